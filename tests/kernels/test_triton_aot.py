"""The Triton kernels compile for GPUs that aren't here, to what they promise."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton isn't installed")

from minivllm.calc import hw
from minivllm_kernels import gpu, report
from minivllm_kernels.report import Facts, broken_promises

BUILD = gpu.load("paged_decode").AOT[1]  # 32 heads of 128 on 8
GOOD = Facts(registers=128, spilled=0, shared=39424, load_bits=128, matrix="mma", blocks=4)


def test_every_build_keeps_its_promises():
    kernels = Path(gpu.__path__[0]).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(kernels), *sys.path])}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, "-m", "minivllm_kernels.report"], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    first_words = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert set(gpu.kernel_names()) <= first_words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spilled": 8}, "spills 8 bytes"),
        ({"load_bits": 64}, "64 bits, not 128"),
        ({"blocks": 3}, "3 blocks fit"),
        ({"matrix": "-"}, "instruction is -, not mma"),
        ({"matrix": "wgmma"}, "is wgmma, not mma"),
        ({"disagreements": ("it multiplies with - in SASS",)}, "multiplies with - in SASS"),
    ],
)
def test_a_broken_promise_is_named(change, said):
    assert broken_promises(BUILD, GOOD) == []
    (broken,) = broken_promises(BUILD, dataclasses.replace(GOOD, **change))
    assert said in broken


@pytest.mark.parametrize(
    ("ptx", "bits"),
    [
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];", 128),
        ("ld.global.b64 {%rd2}, [ %rd1 ];", 64),
        ("ld.global.L1::evict_first.v2.b32 {%r1, %r2}, [ %rd1 ];", 64),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 128),
        ("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", 0),
    ],
)
def test_the_widest_load_is_read_from_ptx(ptx, bits):
    assert report.widest_load(ptx) == bits


@pytest.mark.parametrize(
    ("sass", "bits"),
    [
        ("@P0 LDG.E.128 R4, desc[UR4][R2.64] ;", 128),
        ("LDG.E.LTC128B.64 R4, desc[UR4][R2.64] ;", 64),
        ("LDG.E R4, desc[UR4][R2.64] ;", 32),
        ("LDG.E.U8 R4, desc[UR4][R2.64] ;", 8),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;", 128),
        ("UTMALDG.2D [UR8], [UR4] ;", 128),
        ("LDS.128 R4, [R2] ; STG.E.128 desc[UR4][R2.64], R4 ;", 0),
    ],
)
def test_the_widest_load_is_read_from_machine_code(sass, bits):
    assert report.widest_load_in_sass(sass) == bits


@pytest.mark.parametrize(
    ("sass", "said"),
    [
        ("LDG.E.128 R4, [R2] ; HMMA.16816.F32.BF16 R4, R8, R2, R4 ;", []),
        ("LDG.E.64 R4, [R2] ; HMMA.16816.F32.BF16 R4, R8, R2, R4 ;", ["64 bits in SASS, 128 in PTX"]),
        ("LDG.E.128 R4, [R2] ; HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4 ;", ["wgmma in SASS"]),
        ("LDG.E.128 R4, [R2] ; FFMA R4, R8, R2, R4 ;", ["multiplies with - in SASS"]),
        ("LDG.E.128 R4, [R2] ; HMMA.16816.F32 R4, R8, R2, R4 ; STL [R1], R4 ;", ["1 instructions use local"]),
    ],
)
def test_machine_code_that_does_otherwise_than_its_ptx_is_named(sass, said):
    ptx = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ]; mma.sync.aligned.m16n8k16"
    found = report.disagreements(ptx, sass)
    assert len(found) == len(said)
    assert all(part in whole for part, whole in zip(said, found, strict=True))


def test_blocks_that_fit_are_limited_by_whatever_runs_out_first():
    hopper = report.MULTIPROCESSORS[90]
    assert report.blocks_that_fit(hopper, registers=32, shared=0, num_warps=4) == 16  # 64 warps
    assert report.blocks_that_fit(hopper, registers=255, shared=0, num_warps=4) == 2  # 65,536 registers
    assert report.blocks_that_fit(hopper, registers=32, shared=100 * 1024, num_warps=4) == 2  # 228 KiB
    assert report.blocks_that_fit(hopper, registers=32, shared=0, num_warps=1) == 32  # blocks


@pytest.mark.parametrize(("name", "device"), [("H100", hw.H100), ("H200", hw.H200)])
def test_cards_are_those_of_the_calculators(name, device):
    card = report.CARDS[name]
    assert (card.bandwidth, card.bf16) == (device.bandwidth_bytes_per_s, device.bf16)


@pytest.mark.parametrize("name", gpu.kernel_names())
def test_bytes_and_flops_grow_with_the_job(name):
    kernel = gpu.load(name)
    (first, *_) = kernel.CASES
    count = next(iter(first))
    twice = first | {count: 2 * first[count]}
    if name == "apply_bitmask":
        twice = first | {"masks": 2 * first["masks"]}
    assert kernel.bytes_moved(2, **first) < kernel.bytes_moved(2, **twice) <= 2 * kernel.bytes_moved(2, **first)
    assert kernel.flops(**twice) == 2 * kernel.flops(**first)
    assert kernel.bytes_moved(4, **first) > kernel.bytes_moved(2, **first)
