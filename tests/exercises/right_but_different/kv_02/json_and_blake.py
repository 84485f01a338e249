"""Another hash function over another encoding, tokens before salt; recursion and takewhile instead of loops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from itertools import takewhile

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import ROOT_HASH, Index


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    return hashlib.blake2b(json.dumps([list(token_ids), salt, parent.hex()]).encode(), digest_size=32).digest()


@solves("minivllm.kv.prefix:extend_hashes")
def extend_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, salt: str = "") -> None:
    start = len(hashes) * block_size
    if start + block_size > len(token_ids):
        return
    block = token_ids[start : start + block_size]
    hashes += [hash_block(hashes[-1], block)] if hashes else [hash_block(ROOT_HASH, block, salt)]
    extend_hashes(hashes, token_ids, block_size, salt)


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    usable = (num_tokens - 1) // block_size if num_tokens else 0
    found = map(index.find, hashes[:usable])
    return list(takewhile(lambda block: block is not None, found))
