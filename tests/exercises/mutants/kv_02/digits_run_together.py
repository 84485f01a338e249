"""Hashes the tokens as text without a separator: [1, 23] and [12, 3] are one block."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

from minivllm.course import solves


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    secret = salt.encode()
    text = "".join(map(str, token_ids)).encode()
    return hashlib.sha256(parent + len(secret).to_bytes(4, "big") + secret + text).digest()
