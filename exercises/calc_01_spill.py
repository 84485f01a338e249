"""calc-01 · Tokens a second of a model that doesn't fit · chapter 1 · about 15 minutes · 15 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    2  a model that fits is read at the GPU's speed, one without room at the host's
    4  the times of both memories add
    4  a mixture reads its active bytes only, in the same proportion from both
    2  sizes and speeds that make no sense are refused
    3  for any machine the speed lies between its memories', and more room on the faster never slows it

Grade it:  python -m minivllm.course.grade calc-01          (--hint for a hint)
"""
# cut from the engine: bd619069beb515fb

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
    raise NotImplementedError("calc-01: spill_tps")
