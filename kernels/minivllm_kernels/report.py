"""What the Triton kernels compile to for GPUs that needn't be here: `python -m minivllm_kernels.report`.

Every `AOT` entry of every kernel is compiled for Hopper, and held to what it promises: nothing spilled, 128-bit loads
where memory is the limit, tensor cores where there are matrix products, and as many thread blocks on a streaming
multiprocessor as hiding memory's latency takes. Loads and products are read from PTX, and the machine code that the
assembler made of it (SASS) must have the same. The times are rooflines: what bytes and FLOPs take at a card's peak, so a
measured time is never less. Then the same for the cards that students have. Exit status 1 if a promise is broken.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from minivllm_kernels import gpu
from minivllm_kernels.gpu.form import Build

HOPPER = 90
OTHERS = {75: "T4", 80: "A100", 86: "RTX 30", 89: "RTX 40"}
WIDE = 128
WARP = 32
NAME = 22
"""Characters of the kernels' names."""


@dataclass(frozen=True)
class Multiprocessor:
    """What the thread blocks on one streaming multiprocessor share: warps, blocks, and bytes of shared memory.

    NVIDIA, "CUDA C++ Programming Guide", technical specifications per compute capability.
    """

    warps: int
    blocks: int
    shared: int
    registers: int = 65536
    reserved: int = 1024
    """Bytes of shared memory that the system takes for each block, from compute capability 8.0 on."""


MULTIPROCESSORS = {
    75: Multiprocessor(32, 16, 64 * 1024, reserved=0),
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
}


@dataclass(frozen=True)
class Card:
    """Peaks of a card: bytes/s of its memory, FLOP/s of its tensor cores in bfloat16 (dense) and outside them in float32."""

    bandwidth: float
    bf16: float
    fp32: float


CARDS = {"H100": Card(3.35e12, 989.4e12, 66.9e12), "H200": Card(4.8e12, 989.4e12, 66.9e12)}


@dataclass(frozen=True)
class Facts:
    """What a build compiled to. `load_bits` is the widest load from global memory, `blocks` fit on a multiprocessor."""

    registers: int
    spilled: int
    shared: int
    load_bits: int
    matrix: str
    blocks: int
    disagreements: tuple[str, ...] = ()
    """What machine code has that PTX doesn't say; looked for on Hopper only, as disassembling takes longer than compiling."""


def compile_for(kernel: ModuleType, build: Build, capability: int) -> CompiledKernel:
    """Compile one `AOT` entry; no GPU is needed."""
    function = getattr(kernel, build.kernel)
    names = function.arg_names
    signature = {name: build.arguments.get(name, "constexpr").removesuffix(":16") for name in names}
    aligned = [name for name, kind in build.arguments.items() if kind.endswith(":16")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, signature, dict(build.constants), attributes)
    options = {"num_warps": build.num_warps, "enable_fp_fusion": True}
    return triton.compile(source, GPUTarget("cuda", capability, WARP), options)


def dump(binary: bytes, what: str) -> str:
    """What `cuobjdump` says of a compiled kernel: its "resource-usage", or "sass", its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, f"--dump-{what}", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(binary: bytes) -> tuple[int, int]:
    """Registers a thread of a compiled kernel has, and bytes of stack: what didn't fit in registers is spilled there."""
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", dump(binary, "resource-usage"))
    return int(registers), int(stack)


def widest_load(ptx: str) -> int:
    """Bits of the widest load from global memory in PTX, into registers or straight into shared memory."""
    vectors = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[a-z](\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+)", ptx)
    bulk = [WIDE] if re.search(r"cp\.async\.bulk[\w.]*\.shared::\w+\.global", ptx) else []
    return max(
        [int(count or 1) * int(bits) for count, bits in vectors] + [8 * int(size, 0) for size in copies] + bulk,
        default=0,
    )


def matrix_instruction(ptx: str) -> str:
    """The tensor-core instruction that PTX uses, or "-"."""
    found = re.search(r"wgmma\.mma_async|mma\.sync", ptx)
    return found[0].split(".")[0] if found else "-"


def widest_load_in_sass(sass: str) -> int:
    """As `widest_load`, of machine code: LDG loads registers, LDGSTS shared memory, UTMALDG and UBLKCP whole tiles of it."""
    loads = re.findall(r"\bLDG(?:STS)?\b(?:[\w.]*?\.[US]?(8|16|64|128)\b)?", sass)
    widths = [int(width or 32) for width in loads]
    return max(widths + ([WIDE] if re.search(r"\bU(TMALDG|BLKCP)\b", sass) else []), default=0)


def matrix_instruction_in_sass(sass: str) -> str:
    """As `matrix_instruction`, of machine code: a warp group's products are HGMMA (of integers IGMMA), a warp's HMMA."""
    found = re.search(r"\b[HIQD](G?)MMA\b", sass)
    return "-" if not found else "wgmma" if found[1] else "mma"


def disagreements(ptx: str, sass: str) -> tuple[str, ...]:
    """What machine code does otherwise than its PTX, in words: loads, matrix products, use of local memory."""
    loads, matrix = widest_load_in_sass(sass), matrix_instruction_in_sass(sass)
    local = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return (
        *(
            [f"its widest load has {loads} bits in SASS, {widest_load(ptx)} in PTX"]
            if loads != widest_load(ptx)
            else []
        ),
        *([f"it multiplies with {matrix} in SASS"] if matrix != matrix_instruction(ptx) else []),
        *([f"{local} instructions use local memory"] if local else []),
    )


def blocks_that_fit(chip: Multiprocessor, registers: int, shared: int, num_warps: int) -> int:
    """Thread blocks of so many registers a thread, bytes of shared memory and warps that a multiprocessor holds at once.

    Registers are given to warps by the 256, shared memory to blocks by the 128 bytes.
    """
    by_registers = chip.registers // (-(-registers * WARP // 256) * 256 * num_warps)
    by_shared = chip.shared // max(1, -(-(shared + chip.reserved) // 128) * 128)
    return min(chip.blocks, chip.warps // num_warps, by_registers, by_shared)


def facts(kernel: ModuleType, build: Build, capability: int) -> Facts:
    """Compile a build and read what came of it."""
    compiled = compile_for(kernel, build, capability)
    ptx, shared, binary = compiled.asm["ptx"], compiled.metadata.shared, compiled.asm["cubin"]
    registers, spilled = resources(binary)
    unsaid = disagreements(ptx, dump(binary, "sass")) if capability == HOPPER else ()
    fit = blocks_that_fit(MULTIPROCESSORS[capability], registers, shared, build.num_warps)
    return Facts(registers, spilled, shared, widest_load(ptx), matrix_instruction(ptx), fit, unsaid)


def broken_promises(build: Build, found: Facts) -> list[str]:
    """What a build promised for Hopper and didn't keep, in words."""
    broken = list(found.disagreements)
    if found.spilled:
        broken.append(f"spills {found.spilled} bytes of registers")
    if build.wide_loads and found.load_bits < WIDE:
        broken.append(f"its widest load has {found.load_bits} bits, not {WIDE}")
    if found.blocks < build.blocks_per_sm:
        broken.append(f"{found.blocks} blocks fit on a multiprocessor, not {build.blocks_per_sm}")
    if build.matrix and found.matrix != build.matrix:
        broken.append(f"its tensor-core instruction is {found.matrix}, not {build.matrix}")
    return broken


def roofline(card: Card, build: Build, moved: int, flops: int) -> float:
    """Seconds that bytes and FLOPs take at least, whichever takes longer."""
    return max(moved / card.bandwidth, flops / (card.bf16 if build.matrix else card.fp32))


def builds() -> Iterator[tuple[str, ModuleType, Build]]:
    """All `AOT` entries: the kernel's name, its file, the entry."""
    for name in gpu.kernel_names():
        kernel = gpu.load(name)
        for build in kernel.AOT:
            yield name, kernel, build


HEAD = (
    f"{'kernel':{NAME}}{'sizes':46}{'regs':>5}{'spill':>6}{'shared':>7}{'load':>5}{'matrix':>7}{'blocks/SM':>10}"
    f"{'warps':>6}{'MB':>9}{'GFLOP':>8}{'H100 us':>9}{'H200 us':>9}"
)


def row(name: str, kernel: ModuleType, build: Build, found: Facts) -> str:
    """A line of the table for Hopper."""
    occupancy = found.blocks * build.num_warps / MULTIPROCESSORS[HOPPER].warps
    return (
        f"{name:{NAME}}{build.label:46}{found.registers:5}{found.spilled:6}{found.shared:7}{found.load_bits:5}{found.matrix:>7}"
        f"{f'{found.blocks} (>={build.blocks_per_sm})':>10}{occupancy:6.0%}{job(kernel, build) if build.sizes else ''}"
    )


def job(kernel: ModuleType, build: Build) -> str:
    """The cells that say what the job needs: bytes, FLOPs, and the cards' times for them."""
    moved, flops = kernel.bytes_moved(build.itemsize, **build.sizes), kernel.flops(**build.sizes)
    times = "".join(f"{1e6 * roofline(card, build, moved, flops):9.1f}" for card in CARDS.values())
    return f"{moved / 1e6:9.1f}{flops / 1e9:8.2f}{times}"


def elsewhere(kernel: ModuleType, build: Build, capability: int) -> str:
    """A cell of the table for other cards: registers, spills if any, tensor-core instruction, blocks; or why there are none."""
    if capability in build.not_on:
        return "no"
    found = facts(kernel, build, capability)
    spilled = f", {found.spilled} spilled" if found.spilled else ""
    return f"{found.registers} regs{spilled}, {found.matrix}, {found.blocks}/SM"


def print_hopper() -> list[str]:
    """Print the table for Hopper; returns the broken promises."""
    print(f"Triton {triton.__version__}, sm_{HOPPER}\n\n{HEAD}")
    broken = []
    for name, kernel, build in builds():
        found = facts(kernel, build, HOPPER)
        print(row(name, kernel, build, found))
        broken += [f"{name}, {build.label}: {promise}" for promise in broken_promises(build, found)]
    return broken


def print_others() -> None:
    """Print what the builds compile to for other cards, and why not where they aren't compiled."""
    print(f"\n{'kernel':{NAME}}{'sizes':46}" + "".join(f"{f'sm_{c} ({name})':32}" for c, name in OTHERS.items()))
    reasons: dict[tuple[str, int], str] = {}
    for name, kernel, build in builds():
        print(f"{name:{NAME}}{build.label:46}" + "".join(f"{elsewhere(kernel, build, c):32}" for c in OTHERS))
        reasons |= {(name, capability): why for capability, why in build.not_on.items()}
    print()
    for (name, capability), why in reasons.items():
        print(f"{name}, not on sm_{capability}: {why}")


def main() -> int:
    """Print both tables; 1 if a promise is broken."""
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing would be compiled. Unset it.", file=sys.stderr)
        return 2
    broken = print_hopper()
    print_others()
    for promise in broken:
        print(promise, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
