"""text-01 · Token ids to text, as they come · chapter 2 · about 15 minutes · 13 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    3  text comes as soon as its bytes are complete
    3  a character cut into several tokens comes whole
    3  invalid bytes come as U+FFFD, and nothing is lost at the end
    1  special tokens leave no trace
    3  whatever the bytes and the cuts, the pieces joined are the text decoded as a whole

Grade it:  python -m minivllm.course.grade text-01          (--hint for a hint)
Run it:    python -m minivllm.course.run --with exercises/text_01_detokenizer.py "What is the capital of France?"
"""
# cut from the engine: c539106247becb39

from __future__ import annotations

import codecs
from collections.abc import Callable

from minivllm.course import solves


@solves("minivllm.sample.detok:IncrementalDetokenizer")
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
        raise NotImplementedError("text-01: IncrementalDetokenizer.__init__")

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that it completes, maybe none."""
        raise NotImplementedError("text-01: IncrementalDetokenizer.push")

    def finish(self) -> str:
        """Return what is still held back: U+FFFD if the text ends inside a character, else nothing. Call it last."""
        raise NotImplementedError("text-01: IncrementalDetokenizer.finish")
