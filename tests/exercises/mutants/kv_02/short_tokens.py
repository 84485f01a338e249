"""Two bytes a token: with a vocabulary of over 65,536 different tokens look the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

from minivllm.course import solves


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    secret = salt.encode()
    tokens = b"".join((token % 65_536).to_bytes(2, "big") for token in token_ids)
    return hashlib.sha256(parent + len(secret).to_bytes(4, "big") + secret + tokens).digest()
