"""Where KV memory goes: blocks, waste, what a prefix cache can hit and what an eviction strands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from minivllm.calc.models import Shape


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that `length` tokens take."""
    return -(-length // block_size)


def paged_waste(lens: Sequence[int], block_size: int) -> int:
    """Token slots allocated but unused when sequences of these lengths are kept in blocks of `block_size` slots.

    A sequence fills its blocks in order, so only its last block can be partial: it wastes at most block_size - 1 slots,
    and none when its length is a multiple of `block_size`. A sequence of length 0 holds no block.
    Raises `ValueError` if `block_size` is less than 1 or a length is negative.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    if any(length < 0 for length in lens):
        raise ValueError(f"lens={list(lens)}: lengths must not be negative")
    return sum(-length % block_size for length in lens)


def expected_waste_share(mean_length: float, block_size: int) -> float:
    """Share of allocated slots that is unused on average, 0 to 1, if lengths modulo `block_size` are uniform.

    Then the last block lacks (block_size - 1) / 2 slots on average. An estimate, not a bound.
    """
    unused = (block_size - 1) / 2
    return unused / (mean_length + unused)


def paged_use(lens: Sequence[int], block_size: int) -> float:
    """Share of allocated slots that hold a token when sequences are paged."""
    used = sum(lens)
    return used / (used + paged_waste(lens, block_size))


def reserved_use(lens: Sequence[int], longest: int) -> float:
    """Share of slots that hold a token when every sequence reserves `longest` slots in a row, as it may grow so long."""
    if max(lens) > longest:
        raise ValueError(f"longest={longest}: a sequence has {max(lens)} tokens")
    return sum(lens) / (len(lens) * longest)


def lognormal_lengths(
    count: int = 1000, mu: float = 5.45, sigma: float = 0.9, shortest: int = 16, longest: int = 2048
) -> list[int]:
    """Lengths as chat traffic has them: many short, few very long. The evenly spaced quantiles of a lognormal
    distribution, clipped, from short to long; no chance involved. With the defaults the mean is 342 tokens."""
    normal = NormalDist(mu, sigma)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return [min(longest, max(shortest, int(math.exp(q)))) for q in quantiles]


def block_bytes(shape: Shape, block_size: int = 16, tp: int = 1, kv_element_bytes: int = 2) -> int:
    """Bytes of one KV block on one GPU, all layers.

    Tensor parallelism over `tp` GPUs splits the KV heads; with more GPUs than KV heads every GPU still keeps one, so
    that heads are stored several times. Raises `ValueError` unless tp divides the number of KV heads or is a multiple.
    """
    heads = shape.num_kv_heads
    if tp < 1 or (heads % tp and tp % heads):
        raise ValueError(f"tp={tp}: must divide {heads} KV heads or be a multiple of them")
    return block_size * 2 * shape.num_layers * max(1, heads // tp) * shape.head_dim * kv_element_bytes


def num_blocks(
    total_bytes: float,
    utilization: float,
    weight_bytes: float,
    activation_bytes: float,
    graph_bytes: float,
    non_torch_bytes: float,
    shape: Shape,
    block_size: int = 16,
    tp: int = 1,
    kv_element_bytes: int = 2,
) -> int:
    """KV blocks that fit on each GPU: what is left of its share, divided by the bytes of a block, rounded down.

    `total_bytes` is the memory of one GPU and `utilization` the share of it that the engine may take, 0 to 1.
    `weight_bytes` are those of the whole model, split over `tp` GPUs; the others are of one GPU: peak activations, CUDA
    graphs, and what is allocated outside torch. 0 when nothing is left.

    A ceiling on tokens, not a promise: partial last blocks, the null block and reserves come off it.
    """
    left = utilization * total_bytes - weight_bytes / tp - activation_bytes - graph_bytes - non_torch_bytes
    return max(0, math.floor(left / block_bytes(shape, block_size, tp, kv_element_bytes)))


@dataclass(frozen=True, slots=True)
class PrefixSplit:
    """What the prefix cache can do for one prompt at best. `hit_tokens + computed_tokens` is the prompt."""

    full_blocks: int
    hit_tokens: int
    computed_tokens: int


def best_prefix_hit(prompt_tokens: int, block_size: int = 16) -> PrefixSplit:
    """The split when the same prompt was served before, so that every full block of it is cached.

    Hits are whole blocks, and the last token must be computed in any case, as somebody has to produce its logits: so
    at most floor((n - 1) / block_size) blocks hit. A prompt of exactly k blocks recomputes a whole block.
    """
    hit = max(prompt_tokens - 1, 0) // block_size * block_size
    return PrefixSplit(prompt_tokens // block_size, hit, prompt_tokens - hit)


def stranded_blocks(chain: int, evicted: int) -> int:
    """Blocks of a cached prefix of `chain` blocks that can't be hit any more once block `evicted` (from 0) is gone.

    A lookup walks from the first block and stops at the first miss: everything behind the gap is kept for nothing.
    """
    if not 0 <= evicted < chain:
        raise ValueError(f"evicted={evicted}: must be in [0, {chain})")
    return chain - evicted - 1


def beam_blocks(beams: int, tokens: int, shared: int, block_size: int = 16) -> int:
    """Blocks of `beams` sequences of `tokens` tokens that have their first `shared` tokens in common.

    Full blocks of the common part are held once; from the first block that differs on, every beam has its own.
    With shared=0 these are separate caches. Beams always differ in the last block: they are written on.
    """
    if not 0 <= shared <= tokens:
        raise ValueError(f"shared={shared}: must be in [0, {tokens}]")
    total = blocks_for(tokens, block_size)
    common = min(shared // block_size, max(total - 1, 0))
    return common + beams * (total - common)
