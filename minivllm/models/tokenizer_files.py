"""Builds the tokenizer that a model's files describe: GGUF metadata, or tokenizer.json in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from minivllm.config import ModelError
from minivllm.models.gguf_reader import GGUFFile
from minivllm.models.json_files import Json, read_json
from minivllm.models.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # of tokenizer.ggml.token_type; 1 is an ordinary token

# how each family cuts text before byte-pair merging (the "pre-tokenizer" of their tokenizer.json)
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(file: GGUFFile, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file's metadata describes.

    Raises `ModelError` for a tokenizer that is not byte-level BPE, or an unknown way to cut text before it.
    """
    model = file.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(f"{file.path}: tokenizer {model} is not supported; use a model with byte-level BPE (gpt2)")
    texts = [str(text) for text in file.array("tokenizer.ggml.tokens")]
    kinds = file.array("tokenizer.ggml.token_type")
    if len(kinds) != len(texts):
        raise ModelError(f"{file.path}: {len(texts)} tokens but {len(kinds)} token types; convert the model again")
    split = file.text("tokenizer.ggml.pre", "(none)")
    fast = FastTokenizer(_bpe(file, texts, kinds, ignore_merges=split == "llama-bpe"))
    _set_splitting(fast, split, file.path)
    added = [(text, kind) for text, kind in zip(texts, kinds, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    fast.add_special_tokens([AddedToken(text, normalized=False) for text, kind in added if kind != USER_DEFINED])
    fast.add_tokens([AddedToken(text, normalized=False) for text, kind in added if kind == USER_DEFINED])
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    add_bos = bool(file.integer("tokenizer.ggml.add_bos_token", split == "llama-bpe"))
    template = file.text("tokenizer.chat_template", "") or None
    return _byte_level(file.path, fast, None if bos < 0 else bos, eos_token_ids, add_bos, template)


def tokenizer_from_folder(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """Read tokenizer.json, and the chat template and begin token that tokenizer_config.json names.

    Raises `ModelError` if tokenizer.json is missing, damaged or not byte-level BPE.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: is missing; fetch it (a tokenizer.model alone is not supported)")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{path}: can't be read ({error}); fetch it again") from error
    config = read_json(folder / "tokenizer_config.json", optional=True)
    name = config.get("bos_token")
    bos = fast.token_to_id(name["content"] if isinstance(name, dict) else name) if name else None
    adds_bos = bos is not None and fast.encode("").ids[:1] == [bos]
    return _byte_level(path, fast, bos, eos_token_ids, adds_bos, _chat_template(folder, config))


def _bpe(file: GGUFFile, texts: list[str], kinds: list[Any], *, ignore_merges: bool) -> BPE:
    """The byte-pair model. Entries marked unused only fill the embedding and stand for no text."""
    vocab = {text: token for token, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind != UNUSED}
    pairs = [str(merge).partition(" ") for merge in file.array("tokenizer.ggml.merges")]
    try:
        return BPE(vocab, [(left, right) for left, _, right in pairs], ignore_merges=ignore_merges)
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{file.path}: vocabulary and merges don't fit ({error}); convert the model again") from error


def _set_splitting(fast: FastTokenizer, name: str, path: Path) -> None:
    """Cut text before byte-pair merging as the model family called `name` (tokenizer.ggml.pre) does."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        fast.pre_tokenizer = gpt2
    elif name == "smollm":
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    elif name in ("llama-bpe", "qwen2"):
        cut = pre_tokenizers.Split(Regex(LLAMA3_SPLIT if name == "llama-bpe" else QWEN2_SPLIT), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    else:
        raise ModelError(f"{path}: pre-tokenizer {name} is not supported; use one of smollm, gpt-2, llama-bpe, qwen2")
    if name == "qwen2":
        fast.normalizer = normalizers.NFC()


def _byte_level(path: Path, *parts: Any) -> Tokenizer:
    """`Tokenizer(*parts)`. Raises `ModelError`, naming the file at `path`, if it is of another kind."""
    try:
        return Tokenizer(*parts)
    except KeyError as error:
        raise ModelError(
            f"{path}: is no byte-level BPE (character {error}); use a Llama 3, Qwen or SmolLM2 model"
        ) from None


def _chat_template(folder: Path, config: Json) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json as a string or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template
