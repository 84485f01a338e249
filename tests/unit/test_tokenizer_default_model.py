"""The default model's tokenizer gives the ids of another engine's, on hard strings (who made them: see the file)."""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.models.fetch import resolve_model
from minivllm.models.gguf_reader import read_gguf
from minivllm.models.tokenizer_files import tokenizer_from_gguf

pytestmark = pytest.mark.model

CORPUS = json.loads((Path(__file__).parent.parent / "data" / "tokenizer_corpus.json").read_text("utf-8"))["cases"]
# the vocabulary has no token for these, and drops them as the original does
LOST_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def load(split):
    file = read_gguf(resolve_model(None))
    return tokenizer_from_gguf(replace(file, metadata={**file.metadata, "tokenizer.ggml.pre": split}), (2,))


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm")


@pytest.mark.parametrize("split", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_ids_are_those_of_another_engine(split):
    tokenizer = load(split)
    for case in CORPUS:
        text = case["text"]
        if split == "qwen2" and not unicodedata.is_normalized("NFC", text):
            continue  # the original composes characters first, the other engine does not
        assert tokenizer.encode(text) == case["ids"].get(split, case["ids"]["smollm"]), ascii(text)


def test_ids_are_those_of_another_engine_where_control_tokens_are_text(tokenizer):
    for case in CORPUS:
        expected = case.get("plain", case["ids"]["smollm"])
        assert tokenizer.encode(case["text"], parse_special=False) == expected, ascii(case["text"])


def test_qwen2_composes_characters_first():
    tokenizer = load("qwen2")
    assert tokenizer.encode("e\N{COMBINING ACUTE ACCENT}") == tokenizer.encode("é")


def test_emoji_take_as_many_tokens_as_known(tokenizer):
    assert tokenizer.encode("😀") == [10813, 242, 218]
    assert tokenizer.encode("🙂") == [10813, 38887]


def test_bytes_without_a_token_are_lost(tokenizer):
    present = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    in_utf8 = set(range(0xC0)) | set(range(0xC2, 0xF5))
    assert {byte for byte in in_utf8 if bytes([byte]) not in present} == LOST_BYTES
    assert tokenizer.decode(tokenizer.encode("a\x13b")) == "ab"


@given(text=st.text().filter(lambda text: not LOST_BYTES & set(text.encode())))
def test_any_other_text_survives_there_and_back(tokenizer, text):
    for parse_special in (True, False):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
