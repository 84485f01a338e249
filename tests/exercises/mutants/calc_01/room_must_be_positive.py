"""Refuses a machine without a GPU."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.calc.roofline:spill_tps")
def spill_tps(
    model_bytes: float, gpu_bytes: float, gpu_bw: float, host_bw: float, active_bytes: float | None = None
) -> float:
    if model_bytes <= 0 or gpu_bw <= 0 or host_bw <= 0 or gpu_bytes < 0:
        raise ValueError("sizes and speeds must be positive")
    active = model_bytes if active_bytes is None else active_bytes
    if not 0 < active <= model_bytes:
        raise ValueError("active_bytes must be in (0, model_bytes]")
    if gpu_bytes <= 0:
        raise ValueError("gpu_bytes must be positive")
    share = min(gpu_bytes / model_bytes, 1)
    return 1 / (active * (share / gpu_bw + (1 - share) / host_bw))
