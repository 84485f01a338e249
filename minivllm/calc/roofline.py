"""Bounds on speed: no step is faster than its bytes allow, nor than its arithmetic (Williams et al. 2009, "Roofline")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.calc.hw import Device, Precision
from minivllm.calc.models import Shape


def decode_tps(bandwidth_bytes_per_s: float, bytes_per_token: float) -> float:
    """Most tokens a second for one user: each token reads its bytes of weights and KV once.

    A bound. `bytes_per_token` counts what is really read: the active experts of a mixture, not all of them.
    Raises `ValueError` unless both are positive.
    """
    require_positive(bandwidth_bytes_per_s=bandwidth_bytes_per_s, bytes_per_token=bytes_per_token)
    return bandwidth_bytes_per_s / bytes_per_token


def spill_tps(
    model_bytes: float, gpu_bytes: float, gpu_bw: float, host_bw: float, active_bytes: float | None = None
) -> float:
    """Most tokens a second for one user when the weights that don't fit the GPU stay in host memory and are read there.

    `model_bytes` are all weights, `gpu_bytes` the room for weights on the GPU (bytes); `gpu_bw` and `host_bw` are
    bandwidths in bytes/s. The GPU is filled first, the rest is on the host. The two parts are read one after
    the other, never at the same time, since layers depend on each other.

    `active_bytes` are the bytes of weights that one token reads, for a mixture of experts; by default all of them.
    Whatever a token reads lies on the GPU in the same proportion as the whole model does.

    A bound: KV, arithmetic and transfers between the two are left out. Raises `ValueError` unless `model_bytes` and both
    bandwidths are positive, `gpu_bytes` is not negative and 0 < `active_bytes` <= `model_bytes`.
    """
    require_positive(model_bytes=model_bytes, gpu_bw=gpu_bw, host_bw=host_bw)
    active = model_bytes if active_bytes is None else active_bytes
    if gpu_bytes < 0:
        raise ValueError(f"gpu_bytes={gpu_bytes}: must not be negative")
    if not 0 < active <= model_bytes:
        raise ValueError(f"active_bytes={active_bytes}: must be in (0, model_bytes={model_bytes}]")
    on_gpu = min(gpu_bytes / model_bytes, 1)
    return 1 / (active * (on_gpu / gpu_bw + (1 - on_gpu) / host_bw))


def ridge_flops_per_byte(device: Device, precision: Precision = "bf16") -> float:
    """FLOP per byte at which a device is equally long busy with arithmetic and with memory: peak / bandwidth.

    Raises `ValueError` as `Device.peak` does.
    """
    return device.peak(precision) / device.bandwidth_bytes_per_s


def linear_flops(shape: Shape, tokens: int) -> float:
    """FLOP of all matrix products with weights: one multiplication and one addition a parameter and token."""
    return 2.0 * shape.active_parameters * tokens


def attention_flops(shape: Shape, tokens: int, context: int = 0) -> float:
    """FLOP of scores and weighted sums for `tokens` new tokens after `context` old ones, causal.

    4 x layers x heads x head_dim x pairs, where token i of the new ones sees context + i (about, for many tokens):
    pairs = tokens x context + tokens^2 / 2. Windows aren't counted: every layer sees everything.
    """
    pairs = tokens * context + tokens**2 / 2
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def prefill_seconds(
    shape: Shape, device: Device, tokens: int, context: int = 0, mfu: float = 0.5, precision: Precision = "bf16"
) -> float:
    """Seconds to compute the KV of `tokens` tokens after `context` cached ones, by arithmetic alone.

    `mfu` (model FLOP utilisation) is the share of the peak that is reached: 0.4 to 0.6 for good kernels; 1 is the bound.
    Raises `ValueError` unless it is positive, and as `Device.peak` does.
    """
    require_positive(mfu=mfu)
    return (linear_flops(shape, tokens) + attention_flops(shape, tokens, context)) / (device.peak(precision) * mfu)


@dataclass(frozen=True, slots=True)
class StepBound:
    """The two floors under the time of one step, in seconds."""

    memory_s: float
    compute_s: float
    batch: int

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def limited_by(self) -> Literal["memory", "compute"]:
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch."""
        return self.batch / self.seconds

    @property
    def tokens_per_s_per_user(self) -> float:
        return 1 / self.seconds


def decode_step(
    shape: Shape,
    device: Device,
    batch: int = 1,
    context: int = 0,
    *,
    weight_bytes: float | None = None,
    kv_element_bytes: int = 2,
    precision: Precision = "bf16",
    mfu: float = 1.0,
) -> StepBound:
    """Bounds on one decode step: each of `batch` sequences has `context` tokens and adds one.

    Memory: the weights once for all (`weight_bytes`; by default 2 bytes for every parameter), plus each sequence's KV.
    Compute: 2 FLOP for every active parameter and token, plus attention, at `mfu` of the peak of `precision`.
    A mixture of experts is counted as if the batch touched all experts: true for large batches, too slow for one user
    (for him take `decode_tps` with the active bytes), and as if every layer attended to everything, windows or not.
    Raises `ValueError` unless `batch` and `mfu` are positive, and as `Device.peak` does.
    """
    require_positive(batch=batch, mfu=mfu)
    weights = 2.0 * shape.parameters if weight_bytes is None else weight_bytes
    kv = batch * context * shape.kv_bytes_per_token(kv_element_bytes)
    flops = linear_flops(shape, batch) + batch * attention_flops(shape, 1, context)
    return StepBound((weights + kv) / device.bandwidth_bytes_per_s, flops / (device.peak(precision) * mfu), batch)


def require_positive(**values: float) -> None:
    """Raise `ValueError` naming the first value that is not positive."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be positive")
