"""Tokenizers: what a token stands for, rebuilding from files, and what is refused."""

import json

import pytest

from minivllm.config import ModelError, RequestError
from minivllm.models.loader import open_checkpoint
from minivllm.models.tokenizer import byte_of_character, piece_bytes
from tests.byte_tokenizer import ByteTokenizer
from tests.model_files import CHAT_TEMPLATE, tiny_config, write_folder, write_gguf, write_json
from tests.random_weights import random_weights

BEGIN, END, HELLO = 260, 261, 259
CONFIG = tiny_config()


def from_gguf(path, **settings):
    return open_checkpoint(write_gguf(path / "m.gguf", CONFIG, random_weights(CONFIG), **settings)).tokenizer()


def folder(path):
    return write_folder(path / "tiny", CONFIG, random_weights(CONFIG))


def from_folder(path):
    return open_checkpoint(folder(path)).tokenizer()


@pytest.fixture(params=[from_gguf, from_folder], ids=["gguf", "folder"])
def tokenizer(request, tmp_path):
    return request.param(tmp_path)


def test_text_becomes_the_longest_merges(tokenizer):
    assert tokenizer.encode("hello") == [HELLO]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hell he")] == [b"hell", b" ", b"he"]


def test_no_text_is_no_tokens(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_control_tokens_are_parsed_where_asked(tokenizer):
    assert tokenizer.encode("<|begin|>hello<|end|>") == [BEGIN, HELLO, END]
    plain = tokenizer.encode("<|begin|>", parse_special=False)
    assert BEGIN not in plain
    assert tokenizer.decode(plain) == "<|begin|>"


def test_control_tokens_are_no_text(tokenizer):
    assert tokenizer.special_ids == {BEGIN, END}
    assert tokenizer.decode([BEGIN, HELLO, END]) == "hello"
    assert tokenizer.decode([BEGIN, HELLO, END], skip_special_tokens=False) == "<|begin|>hello<|end|>"
    assert tokenizer.token_bytes(END) == b"<|end|>"


def test_every_byte_stands_for_itself(tokenizer):
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}


def test_half_a_character_decodes_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("é")
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_the_vocabulary_stand_for_nothing(tokenizer):
    assert tokenizer.vocab_size == 262
    assert tokenizer.token_bytes(262) == tokenizer.token_bytes(-1) == b""


def test_files_name_the_ends_and_the_template(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BEGIN, (END,))
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_half_a_surrogate_pair_is_a_bad_request(tokenizer):
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(RequestError, match="half a surrogate pair"):
        ByteTokenizer().encode("a\ud83d")


# the begin token


def test_a_prompt_begins_with_the_begin_token_once(tmp_path):
    tokenizer = from_gguf(tmp_path, extra={"tokenizer.ggml.add_bos_token": 1})
    assert tokenizer.encode_prompt("hello") == [BEGIN, HELLO]
    assert tokenizer.encode_prompt("<|begin|>hello") == [BEGIN, HELLO]


def test_a_prompt_has_no_begin_token_unless_the_model_wants_one(tokenizer):
    assert not tokenizer.add_bos
    assert tokenizer.encode_prompt("hello") == [HELLO]


def test_llama3_wants_one_unless_its_file_says_no(tmp_path):
    assert from_gguf(tmp_path, pre="llama-bpe").add_bos
    assert not from_gguf(tmp_path, pre="llama-bpe", extra={"tokenizer.ggml.add_bos_token": 0}).add_bos


def test_a_folder_wants_one_if_its_post_processor_adds_it(tmp_path):
    path = folder(tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BEGIN], "tokens": ["<|begin|>"]}},
    }  # fmt: skip
    write_json(path / "tokenizer.json", content)
    tokenizer = open_checkpoint(path).tokenizer()
    assert tokenizer.add_bos
    assert tokenizer.encode("hello") == [HELLO]


# chat templates of a folder


def test_a_template_file_wins(tmp_path):
    path = folder(tmp_path)
    (path / "chat_template.jinja").write_text("from the file")
    assert open_checkpoint(path).tokenizer().chat_template == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    path = folder(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "talk"}]
    write_json(path / "tokenizer_config.json", {"bos_token": {"content": "<|begin|>"}, "chat_template": named})
    tokenizer = open_checkpoint(path).tokenizer()
    assert (tokenizer.chat_template, tokenizer.bos_token_id) == ("talk", BEGIN)


def test_a_folder_needs_no_tokenizer_config(tmp_path):
    path = folder(tmp_path)
    (path / "tokenizer_config.json").unlink()
    tokenizer = open_checkpoint(path).tokenizer()
    assert (tokenizer.chat_template, tokenizer.bos_token_id) == (None, None)


# refused


@pytest.mark.parametrize("pre", ["tekken", "default"])
def test_an_unknown_splitting_is_refused_by_name(tmp_path, pre):
    with pytest.raises(ModelError, match=f"pre-tokenizer {pre} is not supported; use one of smollm"):
        from_gguf(tmp_path, pre=pre)


def test_sentencepiece_is_refused(tmp_path):
    path = folder(tmp_path)
    write_json(
        path / "tokenizer.json",
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"▁the": 0}, "merges": []}},
    )
    with pytest.raises(ModelError, match="is no byte-level BPE"):
        open_checkpoint(path).tokenizer()


def test_a_missing_tokenizer_is_refused(tmp_path):
    path = folder(tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: is missing"):
        open_checkpoint(path).tokenizer()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_refused(tmp_path, name):
    path = folder(tmp_path)
    (path / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name}: can't be read"):
        open_checkpoint(path).tokenizer()


# the alphabet, and the toy tokenizer


def test_the_alphabet_has_a_character_for_every_byte():
    assert sorted(byte_of_character().values()) == list(range(256))
    assert piece_bytes("Ġa") == b" a"
    assert piece_bytes("Ċ") == b"\n"
    assert piece_bytes("Ã©") == "é".encode()


def test_the_byte_tokenizer_counts_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([256, 97, 195, 169, 257]) == "aé"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (258, 256, (257,))
    assert tokenizer.special_ids == {256, 257}
