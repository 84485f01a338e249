"""kv-02 · The longest cached prefix · chapter 6 · about 25 minutes · 25 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    6  a hash stands for the block and everything before it
    4  different inputs never look the same to the hash
    5  full blocks get a hash, once; a partial one gets none
    4  the last token is always left to compute
    3  looking up stops at the first miss and changes nothing
    3  a hit is exactly the longest prefix that is cached

Grade it:  python -m minivllm.course.grade kv-02          (--hint for a hint)
Run it:    python -m minivllm.course.run --with exercises/kv_02_longest_hit.py "What is the capital of France?"
"""
# cut from the engine: 496eac691ae182c8

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

from minivllm.course import solves
from minivllm.kv.block_pool import Block
from minivllm.kv.prefix import ROOT_HASH, Index


@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent: bytes, token_ids: Seq[int], salt: str = "") -> bytes:
    """The 32-byte identity of one full block: SHA-256 over parent hash, salt and token ids.

    Every part has a fixed or stated length, so that no two inputs give the same bytes: the parent's 32 bytes, the salt
    in UTF-8 preceded by its length, then each token as 8 bytes (in any byte order: nobody compares the values with
    another engine's). Pass the salt only for a sequence's first block: the chain carries it on.
    """
    raise NotImplementedError("kv-02: hash_block")


@solves("minivllm.kv.prefix:extend_hashes")
def extend_hashes(hashes: list[bytes], token_ids: Seq[int], block_size: int, salt: str = "") -> None:
    """Append the hashes of all full blocks of `token_ids` that `hashes` does not cover yet, in place.

    `token_ids` are all tokens of the sequence from position 0. A partial last block gets no hash: its content still
    changes. Block 0's parent is `ROOT_HASH` (32 bytes), and only block 0 gets the salt. Hashes that are there are not
    computed again, and the next one builds on the last of them: called after every new token it costs nothing until a
    block fills.
    """
    raise NotImplementedError("kv-02: extend_hashes")


@solves("minivllm.kv.prefix:longest_hit")
def longest_hit(hashes: Seq[bytes], num_tokens: int, block_size: int, index: Index) -> list[Block]:
    """The blocks of the longest cached prefix, in order; takes no references and changes nothing.

    At most `num_tokens - 1` tokens may come from the cache (the last-token rule: somebody has to compute logits), and
    hits are whole blocks, so a prompt of whole blocks that are all cached computes its entire last block again. `hashes`
    are those of the sequence's full blocks, maybe of more than `num_tokens` tokens. `index.find(h)`, its only method, gives the
    block published under hash h, or None.
    """
    raise NotImplementedError("kv-02: longest_hit")
