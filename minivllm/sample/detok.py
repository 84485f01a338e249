"""Token ids to text, one token at a time, never taking a character back."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Many

from minivllm.config import at_least

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Streams text by bytes: token id, to its bytes, to an incremental UTF-8 decoder.

    A byte-level BPE token is any piece of bytes, so a character may come in several tokens: decoding tokens one by one
    gives U+FFFD for each part. A decoder that keeps the unfinished bytes until the rest comes is right by construction.
    For tokenizers whose text is the tokens' bytes joined (GPT-2, Llama 3, Qwen, SmolLM2).

    Contract, with `full` the UTF-8 decoding of all bytes pushed, invalid ones as U+FFFD (`errors="replace"`):

    * what `push` returned, joined, is always a prefix of `full`; with what `finish` returns it is `full`;
    * what has been returned is never taken back, and holds no U+FFFD that `full` lacks;
    * at most the last 3 bytes are held back: those of a character that the next token may complete;
    * how the bytes are cut into tokens makes no difference to the text, only to when it comes;
    * tokens in `skip_ids` (special tokens, mostly) count as no bytes at all.

    `token_bytes(id)` gives a token's bytes; what it raises for an unknown id, `push` raises.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skip_ids: frozenset[int] = frozenset()) -> None:
        self.token_bytes = token_bytes
        self.skip_ids = skip_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that it completes, maybe none."""
        if token_id in self.skip_ids:
            return ""
        return self._decoder.decode(self.token_bytes(token_id))

    def finish(self) -> str:
        """Return what is still held back: U+FFFD if the text ends inside a character, else nothing. Call it last."""
        return self._decoder.decode(b"", final=True)


class OffsetDetokenizer:
    """Streams text by comparing decodings of a window: for tokenizers that only offer `decode(ids) -> text`.

    Their text is not the tokens' texts joined: SentencePiece drops a leading space, some add one between words. So the
    text of a new token is what it adds to the decoding of those before it, and a few tokens before are enough. Two
    offsets into the ids, as in vLLM (`tokenizers/detokenizer_utils.py: detokenize_incrementally`):

        ids:   . . . . . | context | unread
                     _prefix     _read

    `decode(context)` has been returned, `decode(context + unread)` minus it is new. While that ends in U+FFFD it may end
    inside a character: wait for the next token. When it doesn't, return it; then unread becomes the new context.

    Contract, with `full` = `decode` of all ids pushed, less `decode(context)` in front if one was given, for a `decode`
    that turns bytes into text as UTF-8 with U+FFFD for what is invalid, each token having at least one byte:

    * what `push` returned, joined, is always a prefix of `full`; with what `finish` returns it is `full`;
    * what has been returned is never taken back, and holds no U+FFFD that `full` lacks;
    * the window is bounded: a model may well emit invalid bytes for ever, or tokens that all end inside a character.
      After `window` unread tokens everything is returned but the last U+FFFD, the only one that can still change (an
      unfinished character decodes to a single one), and the context moves on without waiting for a clean end. vLLM
      waits however long it takes, decoding more and more;
    * tokens in `skip_ids` count as absent.

    `context` are ids that come before the first one, ending on a character; of them the last `window` are used. With
    them the first word keeps its leading space. `window` (tokens, at least 4) trades waiting for cost: a `push` decodes
    about 3 `window` tokens at most.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Many[int] = (),
        skip_ids: frozenset[int] = frozenset(),
        window: int = 6,
    ) -> None:
        at_least("window", window, 4)
        self.decode = decode
        self.skip_ids = skip_ids
        self.window = window
        self._ids = [token for token in context if token not in skip_ids][-window:]
        self._prefix = 0
        self._read = len(self._ids)
        self._sent = len(decode(self._ids))  # characters of decode(_ids[_prefix:]) that have been returned

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now, maybe none."""
        if token_id in self.skip_ids:
            return ""
        self._ids.append(token_id)
        text = self.decode(self._ids[self._prefix :])
        if not text.endswith(REPLACEMENT):
            return self._release(text, len(text), context_from=self._read)
        if len(self._ids) - self._read > self.window:
            return self._release(text, len(text) - 1, context_from=self._cut())
        return ""

    def finish(self) -> str:
        """Return what is still held back, U+FFFD at its end included. Call it last."""
        return self.decode(self._ids[self._prefix :])[self._sent :]

    def _release(self, text: str, end: int, context_from: int) -> str:
        """Return `text[_sent:end]`, all that follows staying held back, and make a new context of the ids from an offset."""
        if end <= self._sent:
            return ""
        delta, held = text[self._sent : end], len(text) - end
        self._prefix, self._read = context_from, len(self._ids)
        self._sent = len(self.decode(self._ids[context_from:])) - held
        return delta

    def _cut(self) -> int:
        """Where a new context may begin although the text doesn't end on a character.

        The context must hold the first byte of the unfinished character; then the text's end is decoded the same, and
        garbled characters at the context's start are old and only counted. At most 2 bytes can follow a first byte
        without finishing the character, so a decoding of 3 characters has it.
        """
        start = max(self._prefix, len(self._ids) - 2 * self.window)
        return start if len(self.decode(self._ids[start:])) >= 3 else self._prefix
