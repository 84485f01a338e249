"""Checks nothing: negative room gives a speed."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.calc.roofline:spill_tps")
def spill_tps(
    model_bytes: float, gpu_bytes: float, gpu_bw: float, host_bw: float, active_bytes: float | None = None
) -> float:
    active = model_bytes if active_bytes is None else active_bytes
    share = min(gpu_bytes / model_bytes, 1)
    return 1 / (active * (share / gpu_bw + (1 - share) / host_bw))
