"""Token ids to text, one token at a time, never taking a character back."""

from __future__ import annotations

import codecs
from collections.abc import Callable


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
