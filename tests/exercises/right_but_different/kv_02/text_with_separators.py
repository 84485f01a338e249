"""Hashes decimal text with separators and lengths; looks all hashes up before it counts how many in front were found."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import sha256

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import ROOT_HASH, Index


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    tokens = ",".join(str(token) for token in token_ids)
    return sha256(f"{parent.hex()}|{len(tokens)}|{tokens}|{salt}".encode()).digest()


@solves("minivllm.kv.prefix:extend_hashes")
def extend_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, salt: str = "") -> None:
    while (end := (len(hashes) + 1) * block_size) <= len(token_ids):
        if hashes:
            hashes.append(hash_block(hashes[-1], token_ids[end - block_size : end]))
        else:
            hashes.append(hash_block(ROOT_HASH, token_ids[:end], salt))


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    found = [index.find(block_hash) for block_hash in hashes]
    count = found.index(None) if None in found else len(found)
    while count and count * block_size >= num_tokens:
        count -= 1
    return found[:count]
