"""Text to token ids and back.

All tokenizers here are byte-level: every token stands for some bytes, and the text is the bytes of its tokens joined.
That is what makes streaming simple (`sample/detok.py`) and grammars possible (`sample/grammar/`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import cast

from tokenizers import Tokenizer as FastTokenizer

from minivllm.config import RequestError


@dataclass(eq=False, repr=False)
class Tokenizer:
    """Text to ids and back: byte-level byte-pair encoding (GPT-2, Llama 3, Qwen, SmolLM2), by the `tokenizers` package.

    `special_ids` are control tokens: no part of the text, skipped when decoding. Which ids begin and end text, and how a
    chat is written, is what a model's files say beside the vocabulary.

    Bytes that have no token are lost in `encode`, as in the original tokenizers: SmolLM2 has none for six control
    characters and for code points from U+40000 to U+BFFFF.

    Raises `KeyError` if a vocabulary entry is not written in GPT-2's alphabet: the tokenizer is then of another kind.
    """

    fast: FastTokenizer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = _pieces(self.fast)

    @cached_property
    def _without_special(self) -> FastTokenizer:
        # the switch belongs to the object, not to the call: a second object keeps concurrent callers apart
        fast = FastTokenizer.from_str(self.fast.to_str())
        fast.encode_special_tokens = True
        return fast

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """The ids of `text`, nothing added. With `parse_special` the names of control tokens in it become those
        tokens: right for a rendered chat template, wrong for text that must not be able to fake one.
        Raises `RequestError` if `text` is not valid Unicode."""
        check_unicode(text)
        fast = self.fast if parse_special else self._without_special
        return cast(list[int], fast.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt: `encode`, behind the begin token if the model wants one and the text has none."""
        ids = self.encode(text)
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for ids beyond the vocabulary (models may pad their embedding)."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return len(self._pieces)


def check_unicode(text: str) -> None:
    """Raise `RequestError` for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "text", text[error.start], "half a surrogate pair is not valid Unicode; send whole characters"
        ) from None


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: 256 printable characters that stand for the bytes in vocabulary files.

    A byte that prints as Latin-1 is its own character; the other 68 are U+0100 onwards, in order. So " " is "Ġ".
    (openai/gpt-2, `src/encoder.py:bytes_to_unicode`.)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def piece_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary entry in GPT-2's alphabet stands for. Raises `KeyError` for other characters."""
    alphabet = byte_of_character()
    return bytes(alphabet[character] for character in piece)


def _pieces(fast: FastTokenizer) -> list[bytes]:
    """The bytes that each id stands for; for a control token its name, such as b"<|im_end|>"."""
    added = fast.get_added_tokens_decoder()
    vocab = fast.get_vocab()
    pieces = [b""] * (max(vocab.values()) + 1)
    for text, token in vocab.items():
        pieces[token] = text.encode("utf-8") if token in added else piece_bytes(text)
    return pieces
