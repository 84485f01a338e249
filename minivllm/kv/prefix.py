"""Prefix caching: the identity of a block is a hash chained through everything before it.

`hash(i) = H(hash(i - 1), tokens of block i, salt in block 0)`. Because of the chain, equal hashes mean equal *prefixes*,
and the longest cached prefix is found by walking hashes left to right until the first miss. Source: vLLM 0.32
`v1/core/kv_cache_utils.py:hash_block_tokens`, which also hashes LoRA names and image hashes; left out here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from typing import Protocol

from minivllm.kv.block_pool import Block

ROOT_HASH = hashlib.sha256(b"minivllm: parent of the first block").digest()
"""Fixed, so that hashes agree between processes and replicas."""


class Index(Protocol):
    """Where published blocks are looked up: `BlockPool.find`."""

    def find(self, block_hash: bytes) -> Block | None: ...


def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    """The 32-byte identity of one full block: SHA-256 over parent hash, salt and token ids.

    Every part has a fixed or stated length, so that no two inputs give the same bytes: the parent's 32 bytes, the salt
    in UTF-8 preceded by its length, then each token as 8 bytes (in any byte order: nobody compares the values with
    another engine's). Pass the salt only for a sequence's first block: the chain carries it on.
    """
    secret = salt.encode("utf-8", "surrogatepass")  # JSON may bring half a surrogate pair
    digest = hashlib.sha256(parent)
    digest.update(len(secret).to_bytes(4, "big") + secret)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def extend_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, salt: str = "") -> None:
    """Append the hashes of all full blocks of `token_ids` that `hashes` does not cover yet, in place.

    `token_ids` are all tokens of the sequence from position 0. A partial last block gets no hash: its content still
    changes. Block 0's parent is `ROOT_HASH` (32 bytes), and only block 0 gets the salt. Hashes that are there are not
    computed again, and the next one builds on the last of them: called after every new token it costs nothing until a
    block fills.
    """
    for i in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else ROOT_HASH
        hashes.append(hash_block(parent, token_ids[i * block_size : (i + 1) * block_size], "" if i else salt))


def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    """The blocks of the longest cached prefix, in order; takes no references and changes nothing.

    At most `num_tokens - 1` tokens may come from the cache (the last-token rule: somebody has to compute logits), and
    hits are whole blocks, so a prompt of whole blocks that are all cached computes its entire last block again. `hashes`
    are those of the sequence's full blocks, maybe of more than `num_tokens` tokens. `index.find(h)`, its only method, gives the
    block published under hash h, or None.
    """
    hits: list[Block] = []
    for block_hash in hashes[: max(num_tokens - 1, 0) // block_size]:
        block = index.find(block_hash)
        if block is None:
            break
        hits.append(block)
    return hits
