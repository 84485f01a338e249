"""A tokenizer for toy models: ids 0 to 255 are the bytes, 256 begins and 257 ends a text."""

from __future__ import annotations

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from minivllm.models.tokenizer import Tokenizer, byte_of_character


class ByteTokenizer(Tokenizer):
    BOS, EOS = 256, 257

    def __init__(self, chat_template: str | None = None) -> None:
        fast = FastTokenizer(BPE(byte_of_character(), []))
        fast.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        fast.add_special_tokens(["<bos>", "<eos>"])
        super().__init__(fast, self.BOS, (self.EOS,), chat_template=chat_template)
