"""Returns the hashes and leaves the list that it was given as it is: nothing ever has a hash, so nothing is hit."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.prefix import ROOT_HASH


@solves("minivllm.kv.prefix:extend_hashes")
def extend_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, salt: str = "") -> list[bytes]:
    out = list(hashes)
    for i in range(len(out), len(token_ids) // block_size):
        parent = out[-1] if out else ROOT_HASH
        out.append(hash_block(parent, token_ids[i * block_size : (i + 1) * block_size], "" if i else salt))  # noqa: F821 (the engine's)
    return out
