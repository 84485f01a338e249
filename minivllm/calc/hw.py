"""Memory, bandwidth and arithmetic peaks of the machines that models run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB = 2**10, 2**20, 2**30
TFLOPS = 1e12


def gib(num_bytes: float) -> str:
    """Bytes as text, in GiB."""
    return f"{num_bytes / GIB:.2f} GiB"


Precision = Literal["bf16", "fp8", "int8", "fp4"]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one computer whose processors share a memory.

    `memory_bytes` is the size on the label, read as decimal; `usable_bytes` is what a program is told that there is, where
    that is known (a label may mean GiB: the driver of an H100 of "80 GB" has 79.18 GiB to give, 85.0 GB). Peaks are *dense* (datasheets like to print
    them with 2:4 sparsity, twice as much) and in FLOP/s, for integers OP/s; None where the hardware has no such unit.
    `link_bytes_per_s` is NVLink per device, both directions summed; `pcie_bytes_per_s` is x16, one direction.
    `source` says where the values are from; `estimated` names those that no vendor has published.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16: float
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None
    link_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    source: str = ""
    estimated: tuple[str, ...] = ()
    usable_bytes: int | None = None

    def peak(self, precision: Precision = "bf16") -> float:
        """Dense peak in FLOP/s; `ValueError` where the device has no unit for `precision`."""
        value: float | None = getattr(self, precision)
        if value is None:
            raise ValueError(f"precision={precision!r}: {self.name} has no such unit; use bf16")
        return value


_PCIE4, _PCIE5 = 31.5e9, 63e9

H100 = Device(
    "H100 SXM", 80 * GB, 3.35e12, bf16=989.4e12, fp8=1978.9e12, int8=1978.9e12,
    link_bytes_per_s=900e9, pcie_bytes_per_s=_PCIE5,
    source="glennklockwood.com/garden/processors/h100: 132 SM at 1.83 GHz", usable_bytes=round(79.18 * GIB),
)  # fmt: skip
H200 = Device(
    "H200 SXM", 141 * GB, 4.8e12, bf16=989.4e12, fp8=1978.9e12, int8=1978.9e12,
    link_bytes_per_s=900e9, pcie_bytes_per_s=_PCIE5,
    source="arithmetic as H100 (same silicon); memory and bandwidth from NVIDIA's product page",
)  # fmt: skip
B200 = Device(
    "B200 SXM", 180 * GB, 8.0e12, bf16=2250e12, fp8=4500e12, int8=4500e12, fp4=9000e12,
    link_bytes_per_s=1800e9, pcie_bytes_per_s=_PCIE5,
    source="glennklockwood.com/garden/processors/B200, HGX at 1 kW; 180 GB usable of 192 GB; INT8 as FP8",
)  # fmt: skip
A100 = Device(
    "A100 SXM 80 GB", 80 * GB, 2.039e12, bf16=311.9e12, int8=623.7e12,
    link_bytes_per_s=600e9, pcie_bytes_per_s=_PCIE4,
    source="NVIDIA A100 datasheet",
)  # fmt: skip
L4 = Device(
    "L4", 24 * GB, 300e9, bf16=121e12, fp8=242e12, int8=242e12,
    pcie_bytes_per_s=_PCIE4,
    source="NVIDIA L4 datasheet; its figures are with sparsity, halved here",
)  # fmt: skip
RTX_4090 = Device(
    "RTX 4090", 24 * GB, 1.008e12, bf16=165.2e12, fp8=330.3e12, int8=660.6e12,
    pcie_bytes_per_s=_PCIE4,
    source="NVIDIA Ada architecture paper; FP32 accumulation, as an engine uses it",
)  # fmt: skip
M4_MAX = Device(
    "Apple M4 Max (40-core GPU)", 128 * GB, 546e9, bf16=34e12,
    source="Apple's product page; the memory is shared by CPU and GPU", estimated=("bf16",),
)  # fmt: skip
M5_MAX = Device(
    "Apple M5 Max", 128 * GB, 614e9, bf16=70e12,
    source="awesomeagents.ai/hardware/apple-m5-max; the GPU has matrix units", estimated=("bf16",),
)  # fmt: skip
DESKTOP_DDR5 = Device(
    "Desktop CPU, two channels of DDR5", 64 * GB, 80e9, bf16=1e12,
    source="DDR5-5600 on 128 bits gives 89.6e9 at best, about 80e9 reached", estimated=("bandwidth_bytes_per_s", "bf16"),
)  # fmt: skip

DEVICES = (H100, H200, B200, A100, L4, RTX_4090, M4_MAX, M5_MAX, DESKTOP_DDR5)
