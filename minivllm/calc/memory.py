"""Where KV memory goes: blocks, waste, windows, what a prefix cache can hit and what an eviction strands.

A block has at least one slot and a length is not negative; only where a docstring says so is that checked.
"""

from __future__ import annotations

import math
from collections import Counter
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

    Then the last block lacks (block_size - 1) / 2 slots on average. `mean_length` is above 0. An estimate, not a bound.
    """
    unused = (block_size - 1) / 2
    return unused / (mean_length + unused)


def paged_use(lens: Sequence[int], block_size: int) -> float:
    """Share of allocated slots that hold a token when sequences are paged, at least one of them with a token.

    Raises `ValueError` as `paged_waste` does.
    """
    used = sum(lens)
    return used / (used + paged_waste(lens, block_size))


def reserved_use(lens: Sequence[int], longest: int) -> float:
    """Share of slots that hold a token when every sequence reserves `longest` slots in a row, as it may grow so long.

    `lens` has at least one length. Raises `ValueError` if one is over `longest`.
    """
    if max(lens) > longest:
        raise ValueError(f"longest={longest}: a sequence has {max(lens)} tokens")
    return sum(lens) / (len(lens) * longest)


def lognormal_lengths(
    count: int = 1000, mu: float = 5.45, sigma: float = 0.9, shortest: int = 16, longest: int = 2048
) -> list[int]:
    """Lengths as chat traffic has them: many short, few very long. The evenly spaced quantiles of a lognormal
    distribution, clipped, from short to long; no chance involved. With the defaults the mean is 342 tokens. Raises
    `ValueError` unless `sigma` is positive."""
    normal = NormalDist(mu, sigma)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return [min(longest, max(shortest, int(math.exp(q)))) for q in quantiles]


def block_bytes(shape: Shape, block_size: int = 16, tp: int = 1, kv_element_bytes: int = 2) -> int:
    """Bytes of one KV block on one GPU: `block_size` tokens in all layers, or in those that share a block.

    Tensor parallelism over `tp` GPUs splits the KV heads; with more GPUs than KV heads every GPU still keeps one, so
    that heads are stored several times. Raises `ValueError` unless tp divides the number of KV heads or is a multiple.
    """
    heads = shape.num_kv_heads
    if tp < 1 or (heads % tp and tp % heads):
        raise ValueError(f"tp={tp}: must divide {heads} KV heads or be a multiple of them")
    return block_size * 2 * layers_per_block(shape.windows) * max(1, heads // tp) * shape.head_dim * kv_element_bytes


def layers_per_block(windows: Sequence[int | None]) -> int:
    """Layers whose KV of a token lies in the same block, for layers with these windows (None: everything is seen).

    Layers with different windows give blocks up at different times, so a block belongs to layers of one kind; and as all
    blocks have one size, every kind is dealt into groups of as many layers. That is the number of the rarest kind; or of
    the commonest where this has less than half as many again: fewer tables for a little waste. One kind: all layers.

    Source: vLLM 0.32, `v1/core/kv_cache_utils.py:get_kv_cache_groups`. Raises `ValueError` for no layers.
    """
    counts = Counter(windows).values()
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


@dataclass(frozen=True, slots=True)
class HybridKV:
    """KV of one sequence on one GPU, in bytes of whole blocks, without and with layer groups.

    `one_table`: all layers share a block table, so that every layer keeps every token. `held`: every group of layers
    has its own, and has given up what its window left behind. `reserved`: what admission must count on, as at no time up
    to there groups hold more.
    """

    one_table: int
    held: int
    reserved: int

    @property
    def saving(self) -> float:
        """Share of `one_table` that groups don't hold. Below 0 where a group is short of layers and a sequence is short."""
        return (self.one_table - self.held) / max(self.one_table, 1)

    @property
    def reserved_saving(self) -> float:
        """Share of `one_table` that admission may give to others."""
        return (self.one_table - self.reserved) / max(self.one_table, 1)


def hybrid_kv(
    shape: Shape, length: int, block_size: int = 16, in_flight: int = 1, tp: int = 1, kv_element_bytes: int = 2
) -> HybridKV:
    """KV of a sequence of `length` tokens in a model of full and sliding-window layers, on each of `tp` GPUs.

    `in_flight` is the number of tokens that the last step has computed, at most `length`; for `reserved`, the most that
    any step computes. The step's first token saw its window, which ends with itself: the blocks that reach into it are
    held. For long sequences `saving` tends to the share of layers with a window, whatever the window. Nothing is
    shared or cached. Raises `ValueError` for a negative length, other sizes below 1, or a tp that `block_bytes` refuses.
    """
    for name, value, least in (("length", length, 0), ("block_size", block_size, 1), ("in_flight", in_flight, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    size, block = layers_per_block(shape.windows), block_bytes(shape, block_size, tp, kv_element_bytes)
    held = reserved = 0
    for window, layers in Counter(shape.windows).items():
        groups = math.ceil(layers / size)
        held += groups * held_blocks(length, window, block_size, in_flight)
        reserved += groups * reserved_blocks(length, window, block_size, in_flight)
    one_table = blocks_for(length, block_size) * block // size * shape.num_layers
    return HybridKV(one_table, held * block, reserved * block)


def held_blocks(length: int, window: int | None, block_size: int = 16, in_flight: int = 1) -> int:
    """Blocks of one layer group that a sequence of `length` tokens holds after a step that computed the last `in_flight`.

    The step's first token saw `window` tokens, itself the last of them (None: all). What ends before is given up.
    """
    first_seen = 0 if window is None else max(length - in_flight - window + 1, 0)
    return blocks_for(length, block_size) - first_seen // block_size


def reserved_blocks(length: int, window: int | None, block_size: int = 16, in_flight: int = 1) -> int:
    """Blocks of one layer group to count on for a sequence of up to `length` tokens, if no step computes over `in_flight`.

    A step sees and computes window - 1 + `in_flight` tokens. They may begin anywhere in a block, hence one more. A bound.
    Source: vLLM 0.32, `v1/kv_cache_interface.py:SlidingWindowSpec`.
    """
    total = blocks_for(length, block_size)
    return total if window is None else min(total, blocks_for(window - 1 + in_flight, block_size) + 1)


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
    graphs, and what is allocated outside torch. 0 when nothing is left. Raises `ValueError` as `block_bytes` does.

    A ceiling on tokens, not a promise: partial last blocks, the null block and reserves come off it.
    """
    one = block_bytes(shape, block_size, tp, kv_element_bytes)
    left = utilization * total_bytes - weight_bytes / tp - activation_bytes - graph_bytes - non_torch_bytes
    return max(0, math.floor(left / one))


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
    Raises `ValueError` unless 0 <= `evicted` < `chain`.
    """
    if not 0 <= evicted < chain:
        raise ValueError(f"evicted={evicted}: must be in [0, {chain})")
    return chain - evicted - 1


def beam_blocks(beams: int, tokens: int, shared: int, block_size: int = 16) -> int:
    """Blocks of `beams` sequences of `tokens` tokens that have their first `shared` tokens in common.

    Full blocks of the common part are held once; from the first block that differs on, every beam has its own.
    With shared=0 these are separate caches. Beams always differ in the last block: they are written on.
    Raises `ValueError` unless 0 <= `shared` <= `tokens`.
    """
    if not 0 <= shared <= tokens:
        raise ValueError(f"shared={shared}: must be in [0, {tokens}]")
    total = blocks_for(tokens, block_size)
    common = min(shared // block_size, max(total - 1, 0))
    return common + beams * (total - common)
