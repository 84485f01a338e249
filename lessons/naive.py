"""Naive baselines of the lessons: what one would write first. Each breaks in its chapter; tests/course/test_naive.py says how."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kv.block_pool import Block, BlockPool
from minivllm.kv.prefix import ROOT_HASH, hash_block
from minivllm.models.decoder import Attention, Decoder
from minivllm.plan import EventKind

# chapter 1: generating


def naive_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within the tokens of this call, which must be all there are: [T, H, D], [T, Hkv, D] twice -> [T, H, D]."""
    return _attend(q, k, v, is_causal=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    attended = F.scaled_dot_product_attention(query, keys, values, is_causal=is_causal, enable_gqa=True)
    return attended[0].transpose(0, 1)


class NaiveCache:
    """K and V of every layer in one tensor each, which grows by copying itself. An `Attention` for one sequence."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append this call's K and V to the layer's, and attend to everything: a whole prompt first, then single tokens."""
        if layer not in self.layers:
            self.layers[layer] = (k, v)
            return naive_attention(layer, q, k, v)
        old = self.layers[layer]
        keys, values = self.layers[layer] = torch.cat((old[0], k)), torch.cat((old[1], v))
        return _attend(q, keys, values, is_causal=False)


def _likeliest(decoder: Decoder, ids: Sequence[int], start: int, attention: Attention) -> int:
    """The token that is most likely to follow `ids`, which stand at positions `start` onwards."""
    positions = torch.arange(start, start + len(ids))
    hidden = decoder.forward(torch.tensor(list(ids)), positions, attention)
    return int(decoder.logits(hidden[-1:]).argmax())


@torch.inference_mode()
def naive_generate(decoder: Decoder, prompt: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """`count` greedy tokens, running the whole text for each. Returns (tokens, how many tokens each step ran)."""
    ids, ran = list(prompt), []
    for _ in range(count):
        ran.append(len(ids))
        ids.append(_likeliest(decoder, ids, 0, naive_attention))
    return ids[len(prompt) :], ran


@torch.inference_mode()
def naive_cached_generate(decoder: Decoder, prompt: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """The same tokens with a `NaiveCache`: the prompt once, then one token a step."""
    cache, ids, ran = NaiveCache(), list(prompt), list[int]()
    for _ in range(count):
        start = sum(ran)
        ran.append(len(ids) - start)
        ids.append(_likeliest(decoder, ids[start:], start, cache))
    return ids[len(prompt) :], ran


def naive_spill_tps(model_bytes: float, gpu_bytes: float, gpu_bw: float, host_bw: float) -> float:
    """Tokens a second as if a spilled model were read at the average of both bandwidths. Wrong: times add, not speeds."""
    on_gpu = min(gpu_bytes / model_bytes, 1)
    return (on_gpu * gpu_bw + (1 - on_gpu) * host_bw) / model_bytes


# chapter 2: text as it comes


def naive_deltas(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Each token decoded by itself: U+FFFD wherever a character comes in several tokens."""
    return [decode([token]) for token in ids]


def naive_redecoded(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Everything decoded again for each token, and what is longer than before sent. What was sent may have changed."""
    texts = [decode(list(ids[:n])) for n in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(texts)]


def naive_offsets(decode: Callable[[list[int]], str], ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """The two offsets of vLLM's slow path, without a bound: it waits for a clean end however long that takes.

    Returns (deltas, how many tokens were decoded for each).
    """
    prefix, read, deltas, work = 0, 0, [], []
    for end in range(1, len(ids) + 1):
        context, text = decode(list(ids[prefix:read])), decode(list(ids[prefix:end]))
        work.append(read - prefix + end - prefix)
        clean = len(text) > len(context) and not text.endswith("\N{REPLACEMENT CHARACTER}")
        deltas.append(text[len(context) :] if clean else "")
        if clean:
            prefix, read = read, end
    return deltas, work


def naive_stop(pieces: Sequence[str], stop: str) -> list[str]:
    """Looks for a stop string in each piece by itself: one that comes in two pieces is never found, and shown."""
    shown = []
    for piece in pieces:
        before, found, _ = piece.partition(stop)
        shown.append(before)
        if found:
            break
    return shown


def naive_holdback(pieces: Sequence[str], stops: Sequence[str]) -> Iterator[int]:
    """Characters held back after each piece by who always holds as many as could begin the longest stop string."""
    length, longest = 0, max(map(len, stops), default=1) - 1
    for piece in pieces:
        length += len(piece)
        yield min(length, longest)


# chapter 3: memory in one piece


class NaiveArena:
    """Gives each sequence one contiguous range of slots, in the first hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self.holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, length), by start, never touching

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self.holes)

    @property
    def largest_hole(self) -> int:
        return max((length for _, length in self.holes), default=0)

    def allocate(self, length: int) -> int | None:
        """The first slot of a new range; None if no hole is large enough, however much is free in all."""
        for i, (start, size) in enumerate(self.holes):
            if size >= length:
                self.holes[i : i + 1] = [(start + length, size - length)] if size > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Take a range back and join it with the holes it touches."""
        merged: list[tuple[int, int]] = []
        for hole, size in sorted([*self.holes, (start, length)]):
            if merged and sum(merged[-1]) == hole:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((hole, size))
        self.holes = merged


# chapter 6: prefix cache


class NaivePromptCache:
    """Remembers whole prompts. A hit needs the same prompt again, to the last token."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that need not be computed; remembers the prompt."""
        key = tuple(prompt)
        found = len(key) if key in self.known else 0
        self.known.add(key)
        return found


def naive_hash_block(parent: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Like `hash_block`, but forgets the parent: blocks with the same tokens look the same, whatever stood before them."""
    return hash_block(ROOT_HASH, token_ids, salt)


class NaiveRandomPool(BlockPool):
    """Evicts any free block, with equal chance, instead of the one that was free longest."""

    def __init__(self, num_blocks: int, seed: int = 0, **settings: bool) -> None:
        super().__init__(num_blocks, **settings)
        self.random = random.Random(seed)

    def allocate(self, n: int) -> list[Block]:
        """Like `BlockPool.allocate`, with random victims."""
        taken = self.random.sample(list(self.free_list), n)
        for block in taken:
            self.free_list.remove(block)
            if block.hash is not None:
                self.withdraw(block, EventKind.EVICTED)
            block.ref_count = 1
        return taken


def naive_stranded(pool: BlockPool, chains: Iterable[Sequence[bytes]]) -> int:
    """How many published blocks no lookup can reach, counted the slow way: walk every chain of hashes that was ever made.

    A block is reachable if all blocks before it in some chain are published.
    """
    reachable: set[bytes] = set()
    for chain in chains:
        for block_hash in chain:
            if pool.find(block_hash) is None:
                break
            reachable.add(block_hash)
    return sum(len(copies) for block_hash, copies in pool.published.items() if block_hash not in reachable)
