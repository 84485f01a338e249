"""The vocabulary as a trie over bytes: one walk from an automaton's state tells for every token where it leads.

Tokens that begin alike share their beginning, so a walk costs one table look-up for each node of the trie instead of
one for each byte of each token, and a branch that the automaton can't follow is left out whole. Nodes are numbered
level by level: all nodes of a level are looked up at once, and the children of a node have numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model may say. Ids are in [0, size), the width of its logits.

    Node 0 of the trie is the root. `parent` and `byte` [nodes] tell how a node is reached (the root's mean nothing),
    `first_child` and `num_children` [nodes] where it leads. Token `token_ids[i]` ends at node `token_nodes[i]` and has
    its bytes in `texts`; control tokens and ids that stand for no bytes are in neither. `eos_token_ids` end a text.
    """

    size: int
    eos_token_ids: tuple[int, ...]
    texts: dict[int, bytes]
    token_ids: IntArray
    token_nodes: IntArray
    parent: IntArray
    byte: NDArray[np.uint8]
    first_child: IntArray
    num_children: IntArray

    def children(self, nodes: IntArray) -> IntArray:
        """All children of `nodes`, in order."""
        counts = self.num_children[nodes]
        ends = np.cumsum(counts)
        first = self.first_child[nodes] - (ends - counts)
        return np.repeat(first, counts) + np.arange(ends[-1] if len(ends) else 0)

    @property
    def single_bytes(self) -> NDArray[np.uint8]:
        """The bytes that are tokens by themselves."""
        return self.byte[self.token_nodes[self.parent[self.token_nodes] == 0]]


def build_vocabulary(
    token_bytes: Callable[[int], bytes], size: int, special_ids: Collection[int], eos_token_ids: Collection[int]
) -> Vocabulary:
    """The trie of tokens 0 to size - 1, without control tokens, those that end a text, and ids that stand for no bytes."""
    without = {*special_ids, *eos_token_ids}
    texts = {i: text for i in range(size) if i not in without and (text := token_bytes(i))}
    token_ids = np.fromiter(texts, np.int64, len(texts))
    lengths = np.fromiter(map(len, texts.values()), np.int64, len(texts))
    begins = np.cumsum(lengths) - lengths
    flat = np.frombuffer(b"".join(texts.values()), np.uint8)
    token_nodes = np.zeros(len(texts), np.int64)
    parents, values = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    num_nodes = 1
    for depth in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > depth)
        steps = token_nodes[longer] * 256 + flat[begins[longer] + depth]
        new, which = np.unique(steps, return_inverse=True)
        token_nodes[longer] = num_nodes + which
        parents.append(new // 256)
        values.append(new % 256)
        num_nodes += len(new)
    parent = np.concatenate(parents)
    num_children = np.bincount(parent[1:], minlength=num_nodes)
    first_child = 1 + np.cumsum(num_children) - num_children
    byte = np.concatenate(values).astype(np.uint8)
    eos = tuple(sorted(i for i in eos_token_ids if 0 <= i < size))
    return Vocabulary(size, eos, texts, token_ids, token_nodes, parent, byte, first_child, num_children)
