"""The other way to stream text, which this engine has no need of: for tokenizers that hide their tokens' bytes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from minivllm.config import at_least

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class OffsetDetokenizer:
    """Streams text by comparing decodings of a window: for tokenizers that only offer `decode(ids) -> text`.

    Their text is not the tokens' texts joined: SentencePiece drops a leading space, some add one between words. So the
    text of a new token is what it adds to the decoding of those before it, and a few tokens before are enough. Two
    offsets into the ids, as in vLLM (`tokenizers/detokenizer_utils.py: detokenize_incrementally`):

        ids:   . . . . . | context | unread
                     _prefix     _read

    What `decode(context + unread)` adds to `decode(context)` is new. While it ends in U+FFFD it may end inside a
    character: wait for the next token. When it doesn't, return it; then unread becomes the context.

    Contract, with `full` = `decode` of all ids pushed (with `context`: what they add to it), for a `decode` that turns
    bytes into text as UTF-8, with U+FFFD for what is invalid:

    * what `push` returned, joined, is always a prefix of `full`; with what `finish` returns it is `full`;
    * what has been returned is never taken back, and holds no U+FFFD that `full` lacks;
    * waiting ends: a model may emit invalid bytes for ever, or tokens that all end inside a character. When more than
      `window` tokens are unread, all is returned but the last U+FFFD, the only one that can still change (an unfinished
      character decodes to a single one). vLLM waits however long it takes, and decodes more each time;
    * hence a `push` decodes at most 2 `window` + 2 tokens, if each has at least one byte;
    * tokens in `skip_ids` count as absent.

    `context` are ids that come before the first one, ending on a character; the last `window` of them are used. With
    them the first word keeps its leading space. `window` is at least 4: decoders of byte-fallback tokens (Llama 2) give
    U+FFFD for each byte of a run until the run is valid, so a character's worth of them must be waited for.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Many[int] = (),
        skip_ids: frozenset[int] = frozenset(),
        window: int = 6,
    ) -> None:
        at_least(4).check("window", window)
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
            return self._release(text, len(text))
        if len(self._ids) - self._read > self.window:
            return self._release(text, len(text) - 1)
        return ""

    def finish(self) -> str:
        """Return what is still held back, U+FFFD at its end included. Call it last."""
        return self.decode(self._ids[self._prefix :])[self._sent :]

    def _release(self, text: str, end: int) -> str:
        """Return `text[_sent:end]`, the rest staying held back, and make the unread ids the context.

        If there is something to return, a character that is held back began among the unread: before them, it would have
        been held back by the last release, and everything in front of it returned then. So the new context ends as
        the old one did. It may begin inside a character; what that is garbled to is old, and only counted.
        """
        if end <= self._sent:
            return ""
        delta, held = text[self._sent : end], len(text) - end
        self._sent = len(self.decode(self._ids[self._read :])) - held
        self._prefix, self._read = self._read, len(self._ids)
        return delta
