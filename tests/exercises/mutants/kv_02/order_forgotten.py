"""Hashes the set of tokens: blocks with the same tokens in another order are one."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

from minivllm.course import solves


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    secret = salt.encode()
    digest = hashlib.sha256(parent + len(secret).to_bytes(4, "big") + secret)
    digest.update(array("q", sorted(token_ids)).tobytes())
    return digest.digest()
