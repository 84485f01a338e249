"""What a decoder is built of: packed linear layers, RMSNorm, rotary embeddings.

Each is a few lines of torch, and the definition of what a faster kernel of the same name (`LayerOps`) must compute. Where
torch has a slow and a fast way to say the same thing on a CPU, the fast one stands here and
book/decisions/0002-cpu-speed.md holds the figures.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig, RopeScaling

log = logging.getLogger(__name__)


class PackedLinear:
    """`x @ weight.T + bias` for x [T, in] with weight [out, in], in oneDNN's blocked layout where that exists.

    On a CPU a row-major bfloat16 weight is read far below memory speed when T is small; packed once at load, it's read
    at full speed.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight.dtype, weight.device.type)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Linear layer: [T, in] -> [T, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether oneDNN has packed linear layers for this dtype and device; says once, in the log, why not."""
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        log.info("linear layers stay unpacked: no packed layout for %s on %s", dtype, device_type)
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), None)
        torch.ops.mkldnn._linear_pointwise(torch.ones(1, 16, dtype=dtype), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        log.warning("linear layers stay unpacked, decoding is slow: this torch can't pack %s (%s)", dtype, error)
        return False
    return True


class LayerOps(Protocol):
    """What a layer does between its matrix products: this module's functions, or kernels that compute the same."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gated_silu(self, gate_up: Tensor) -> Tensor: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` over the last dimension of x [..., D], in the weight's dtype; mean and root
    in float32 or better.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, x.shape[-1:], None, eps).to(weight.dtype).mul_(weight)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to the residual stream x, both [T, D], in place; returns the sum's `rms_norm`."""
    return rms_norm(x.add_(update), weight, eps)


def gated_silu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for gate and up side by side, [T, 2 * inner] -> [T, inner]. Shazeer, "GLU Variants", 2020."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each pair of a head's elements, float64 [head_dim / 2]: theta ** (-2i / head_dim).

    Su et al., "RoFormer", 2021; with `config.rope_scaling`, Llama 3's scaling on top.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    return frequencies if config.rope_scaling is None else scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling: divide slow frequencies by `factor`, keep fast ones, and blend in between.

    A frequency is slow when its wavelength exceeds original_max_position / low_freq_factor, and fast when it's under
    original_max_position / high_freq_factor. (transformers 5.24, `modeling_rope_utils.py:_compute_llama3_parameters`.)
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class Rotary:
    """Rotary position embedding, half-split layout (GPT-NeoX, Hugging Face): element i turns with element i + D / 2."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._frequencies = rotary_frequencies(config).to(device, self._wide)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [T, 1, D], for positions int64 [T]: once a step, for all layers."""
        angles = positions.to(self._wide)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (torch.cat((cos, cos), -1)[:, None].to(self.dtype), torch.cat((-sin, sin), -1)[:, None].to(self.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads x [T, H, D] by the angles behind cos and signed sin [T, 1, D] (from `Rotary.at`).

    (a, b) -> (a cos - b sin, b cos + a sin). Rolling by D / 2 brings each element's partner into its place, and the
    signed sine has the minus.
    """
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)
