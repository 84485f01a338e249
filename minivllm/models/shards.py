"""What each rank of a tensor-parallel group holds of a model: a smaller model of the same kind, with part of each layer.

The layers that open a block (query, key and value; gate and up) are split by their outputs, whole heads together; those
that close it (output, down) by their inputs. In between every rank works alone on its heads and its part of the
feed-forward network, and one sum a block makes the ranks' results the layer's (Shoeybi et al., "Megatron-LM", 2019).
Norms and the embedding are whole at every rank. So is the head: only rank 0 asks for logits, so nobody gathers them.

Source: vLLM 0.32 `model_executor/layers/linear.py:QKVParallelLinear`, `MergedColumnParallelLinear`, `RowParallelLinear`;
also there a KV head lies at several ranks when there are more ranks than KV heads. Different here: heads may be dealt
unevenly (9 on 2 ranks), which it refuses. Left out: splitting embedding and head by tokens, as its
`vocab_parallel_embedding.py` does, for one more sum and a gathering of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from minivllm.config import ConfigError, ModelConfig

LANES = 16
"""The feed-forward network is cut at multiples of this where it can be: vector kernels want whole vectors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of `model`: which heads, which KV heads, which elements of the feed-forward network."""

    model: ModelConfig
    heads: range
    kv_heads: range
    inner: range

    @property
    def config(self) -> ModelConfig:
        """The shape of the part; as a model, except that its blocks end in a sum over all ranks."""
        heads, kv_heads, inner = map(len, (self.heads, self.kv_heads, self.inner))
        return replace(self.model, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """The part of a weight or bias of the whole model (`name` is its Hugging Face name): itself if it isn't split, else a
        copy, so that the whole one can go."""
        heads, kv_heads = (_times(part, self.model.head_dim) for part in (self.heads, self.kv_heads))
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": self.inner, "up_proj": self.inner}
        columns = {"o_proj": heads, "down_proj": self.inner}
        layer = name.split(".")[-2]
        part = rows.get(layer) or columns.get(layer)
        if part is None or len(part) == weight.shape[dim := int(layer in columns)]:
            return weight
        return weight.narrow(dim, part.start, len(part)).clone()


def make_shard(model: ModelConfig, rank: int, size: int) -> Shard:
    """Part `rank` of `size`. Raises `ConfigError` with the sizes that can be had if `size` can't."""
    if not can_split(model, size):
        legal = ", ".join(str(n) for n in range(1, model.num_heads + 1) if can_split(model, n))
        raise ConfigError(
            "tensor_parallel_size",
            size,
            f"can't split {model.num_heads} heads with {model.num_kv_heads} KV heads: a rank has whole KV heads, or a KV head "
            f"has as many ranks as each other one, with at least one query head each; use {legal}",
        )
    return Shard(model, *split_heads(model.num_heads, model.num_kv_heads, rank, size), _split_inner(model, rank, size))


def can_split(model: ModelConfig, size: int) -> bool:
    """Whether each of `size` ranks can have a part of the heads and of the feed-forward network."""
    whole_groups = size <= model.num_kv_heads
    replicated = size % model.num_kv_heads == 0 and size <= model.num_heads
    return (whole_groups or replicated) and size <= model.intermediate_size


def split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """Query heads and KV heads of a rank.

    Up to one rank a KV head, ranks get whole KV heads, each with the query heads that read it; some get one more than
    others. With more ranks, each KV head is at size / num_kv_heads ranks, which share its query heads: its cache is then
    held that many times, and more ranks need no less memory for it. (vLLM 0.32 asks for one of the two to divide the
    other, `model_executor/models/llama.py:LlamaAttention`.)
    """
    group = num_heads // num_kv_heads
    replicas = max(1, size // num_kv_heads)
    kv_heads = spread(num_kv_heads, rank // replicas, size // replicas)
    readers = spread(len(kv_heads) * group, rank % replicas, replicas)
    first = kv_heads.start * group
    return range(first + readers.start, first + readers.stop), kv_heads


def spread(total: int, index: int, parts: int) -> range:
    """Part `index` when `total` things in a row are cut into `parts` as even as possible, larger ones first."""
    share, more = divmod(total, parts)
    start = index * share + min(index, more)
    return range(start, start + share + (index < more))


def _split_inner(model: ModelConfig, rank: int, size: int) -> range:
    inner = model.intermediate_size
    unit = LANES if inner % LANES == 0 and inner >= LANES * size else 1
    return _times(spread(inner // unit, rank, size), unit)


def _times(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)
