"""calc-01 · Tokens a second of a model that doesn't fit: the engine's own answer, cut from it. Do not edit."""

from __future__ import annotations

from minivllm.calc.roofline import require_positive
from minivllm.course import solves


@solves("minivllm.calc.roofline:spill_tps")
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
