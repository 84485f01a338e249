"""Hashes the block alone: the same 16 tokens after another prompt are taken for the same K and V."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

from minivllm.course import solves


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    secret = salt.encode()
    return hashlib.sha256(len(secret).to_bytes(4, "big") + secret + array("q", token_ids).tobytes()).digest()
