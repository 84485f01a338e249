"""The Triton kernels as the engine calls them: results are allocated here, arguments are checked by each `launch`.

The torch code of the same name in `minivllm.models.layers` is the definition of the layers' functions. Whether the kernels
can run says `why_not`; whether they can run a model, `supports`. Triton is imported when one of them is first used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minivllm_kernels.gpu import load

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_HIDDEN = 16384
LEAST_CAPABILITY = (8, 0)
"""Attention's matrix products have no instruction on older GPUs that Triton would use."""


@cache
def why_not(device: str) -> str | None:
    """Why Triton's kernels can't run on tensors of a device ("cuda", "cpu"), or None if they can. Runs one to see."""
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed (Linux: pip install 'minivllm[kernels]')"
    return wrong_mode(device, interpreted()) or trial(device)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def wrong_mode(device: str, interpreter: bool) -> str | None:
    """Why kernels can't run on a device with Triton's interpreter on or off."""
    if device == "cpu":
        return None if interpreter else "the model runs on the CPU, where Triton needs TRITON_INTERPRET=1 set"
    if device != "cuda":
        return f"the model runs on {device}"
    if interpreter:
        return "TRITON_INTERPRET=1 is set, which is for CPUs: unset it"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < LEAST_CAPABILITY:
        return f"the GPU has compute capability {major}.{minor}, they need {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


def trial(device: str) -> str | None:
    """What goes wrong when a small kernel runs; None if nothing does. Triton needs a C compiler, a driver that fits, and a
    folder to write to, and says so in errors of many kinds."""
    try:
        gated_silu(torch.ones(1, 2, device=device))
    except Exception as error:
        first_line, *_ = str(error).strip().splitlines() or ["no message"]
        return f"a trial kernel failed ({type(error).__name__}: {first_line})"
    return None


def supports(dtype: torch.dtype, sizes: Any) -> str | None:
    """Why the kernels can't run a model of this dtype, with these `head_dim` and `hidden_size`; None if they can."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}"
    if sizes.head_dim % 2 or sizes.head_dim > MAX_HEAD_DIM:
        return f"head size {sizes.head_dim} is not an even number up to {MAX_HEAD_DIM}"
    return f"hidden size {sizes.hidden_size} is more than {MAX_HIDDEN}" if sizes.hidden_size > MAX_HIDDEN else None


@cache
def launch(name: str) -> Callable[..., None]:
    """The `launch` of a kernel."""
    return load(name).launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` for the residual stream x float32 [T, D]; in the weight's dtype."""
    out = torch.empty_like(x, dtype=weight.dtype)
    launch("rmsnorm")(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` [T, D] to the residual stream x float32 [T, D], in place; returns its `rms_norm`."""
    out = torch.empty_like(update)
    launch("rmsnorm")(x, update, weight, out, eps)
    return out


def gated_silu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for gate and up side by side, [T, 2 * inner] -> [T, inner]."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    launch("silu_mul")(gate_up, out)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads x [T, H, D] by the angles behind cos and signed sin [T, 1, D], in place; returns x."""
    half = x.shape[2] // 2
    launch("rope")(x, cos[:, 0, :half], sin[:, 0, half:], interleaved=False)
    return x


def store_kv(k: Tensor, v: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Put k and v [T, Hkv, D] into slots int64 [T] of cache [2 * Hkv, S, D], the K heads first. Slot -1: nowhere."""
    launch("store_kv")(k, v, slots, cache)


def paged_attention(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor | None, block_size: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of B rows over K and V where the cache [2 * Hkv, S, D] has them: q [T, H, D] -> [T, H, D].

    Row r's tokens are q[starts[r] : starts[r + 1]], the last of its lengths[r] positions, whose blocks are tables[r];
    without `starts`, each row is one token. `starts` int64 [B + 1], `lengths` int64 [B], `tables` int64 [B, M]. A row of
    length 0 is padding.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if starts is None:
        launch("paged_decode_splitkv")(q, cache, tables, lengths, out, block_size, window)
    else:
        launch("unified_attention")(q, cache, tables, lengths, starts, out, block_size, window)
    return out


def cuda_graph(run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """Capture what `run` launches, to launch it again at once; results stay where they are. It runs once before, to compile
    its kernels. Graphs of one `torch.cuda.graph_pool_handle()` share memory."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
