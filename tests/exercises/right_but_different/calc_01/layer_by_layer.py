"""Adds up the time of ten thousand equal layers, the last one on the GPU partly."""

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
    layers = 10_000
    room, seconds = gpu_bytes / model_bytes * layers, 0.0
    for _ in range(layers):
        here = min(1.0, max(0.0, room))
        seconds += here / gpu_bw + (1 - here) / host_bw
        room -= 1
    return layers / (active * seconds)
