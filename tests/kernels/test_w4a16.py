"""Four-bit weights: their packed order, and the PTX that makes numbers of them, executed here as text, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton isn't installed")

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from minivllm_kernels import gpu
from tests.kernels.test_triton import fresh, prove_cases

W4A16 = gpu.load("w4a16_matmul")
ALL_HALVES = torch.arange(2**16)
"""Every 16 bits there are."""
WEIGHTS_A_WORD = 8

EXECUTE = {
    "mov.b32": lambda kind, a: a,
    "shr.u32": lambda kind, a, count: a >> count,
    "lop3.b32": lambda kind, a, b, c, table: look_up(a, b, c, table),
    "sub.f16x2": lambda kind, a, b: in_halves(lambda x, y: x - y, kind, a, b),
    "fma.rn.f16x2": lambda kind, a, b, c: in_halves(lambda x, y, z: x * y + z, kind, a, b, c),
    "fma.rn.bf16x2": lambda kind, a, b, c: in_halves(lambda x, y, z: x * y + z, kind, a, b, c),
}
"""What the instructions do to 32 bits, kept in int64. Those of halves are computed exactly in float64, then rounded."""


def look_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """lop3: the table's bit number 4a + 2b + c, for each bit of 32."""
    result = torch.zeros_like(a)
    for bit in range(32):
        index = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        result |= (table >> index & 1) << bit
    return result


def to_numbers(bits: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(kind).double()


def to_bits(numbers: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return numbers.to(kind).view(torch.int16).long() & 0xFFFF


def in_halves(compute, kind: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    low = compute(*(to_numbers(each & 0xFFFF, kind) for each in operands))
    high = compute(*(to_numbers(each >> 16, kind) for each in operands))
    return to_bits(high, kind) << 16 | to_bits(low, kind)


def twice(value: float, kind: torch.dtype) -> torch.Tensor:
    bits = to_bits(torch.tensor([value]), kind)
    return bits << 16 | bits


def instructions(ptx: str) -> list[tuple[str, list[str]]]:
    """Its lines but declarations: the instruction and its operands, the result first."""
    lines = [line.strip("; ").replace(",", "").split() for line in ptx.strip("{}\n").splitlines()]
    return [(name, operands) for name, *operands in lines if name != ".reg"]


def run_ptx(ptx: str, kind: torch.dtype, *arguments: torch.Tensor) -> list[torch.Tensor]:
    """The four results of PTX for three arguments of 32 bits (int64, $4 to $6): float64 [words, 2], low half first."""
    registers = dict(zip(("$4", "$5", "$6"), arguments, strict=True))
    for name, (target, *operands) in instructions(ptx):
        values = [registers[each] if each in registers else torch.tensor([int(each, 0)]) for each in operands]
        registers[target] = EXECUTE[name](kind, *torch.broadcast_tensors(*values))
    return [torch.stack([to_numbers(registers[f"${i}"] >> s & 0xFFFF, kind) for s in (0, 16)], -1) for i in range(4)]


def execute(ptx: str, kind: torch.dtype, words: torch.Tensor, zero: int) -> list[torch.Tensor]:
    """The results for words and a zero point."""
    added = -(64 + zero) if kind == torch.float16 else -(128 + zero)
    return run_ptx(ptx, kind, words, twice(1024 + zero, kind), twice(added, kind))


KINDS = [(torch.float16, W4A16.HALF_PTX), (torch.bfloat16, W4A16.BRAIN_PTX)]
both_kinds = pytest.mark.parametrize(("kind", "ptx"), KINDS, ids=["float16", "bfloat16"])


@given(rows=st.integers(1, 5), depth=st.integers(1, 300), seed=st.integers(0, 99))
def test_unpacking_gives_back_what_was_packed(rows, depth, seed):
    weights = torch.randint(0, 16, (rows, depth), generator=torch.Generator().manual_seed(seed))
    packed = W4A16.pack(weights)
    assert packed.shape == (-(-depth // 128), rows, 16)
    assert packed.dtype == torch.int32
    assert torch.equal(W4A16.unpack(packed, depth), weights.int())


def test_the_packed_order_is_a_permutation():
    assert sorted(W4A16.order().flatten().tolist()) == list(range(128))


@pytest.mark.parametrize("wrong", [-1, 16])
def test_what_has_more_than_four_bits_is_not_packed(wrong):
    with pytest.raises(ValueError, match=r"^weights: .*0 to 15"):
        W4A16.pack(torch.tensor([[0, wrong]]))


@both_kinds
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_the_ptx_makes_exactly_nibble_minus_zero_of_all_16_bits(kind, ptx, zero):
    words = ALL_HALVES.flip(0) << 16 | ALL_HALVES
    for nibble, numbers in enumerate(execute(ptx, kind, words, zero)):
        low = (ALL_HALVES >> 4 * nibble & 15) - zero
        assert torch.equal(numbers[:, 0], low.double())
        assert torch.equal(numbers[:, 1], low.flip(0).double())


@both_kinds
def test_the_ptx_finds_weights_where_they_were_packed(kind, ptx):
    """Nibble j of a chunk's halves of words are its weights 32 j to 32 j + 31, in order."""
    weights = torch.randint(0, 16, (1, 128), generator=torch.Generator().manual_seed(0))
    words = W4A16.pack(weights).flatten().long() & 0xFFFFFFFF
    found = torch.cat([numbers.flatten() for numbers in execute(ptx, kind, words, zero=8)])
    assert torch.equal(found, weights[0].double() - 8)


@pytest.mark.parametrize(("ptx", "count"), [(W4A16.HALF_PTX, 9), (W4A16.BRAIN_PTX, 11)], ids=["float16", "bfloat16"])
def test_eight_weights_take_few_enough_instructions_for_an_h100(ptx, count):
    """A warp's 32 lanes on each of 4 schedulers of 132 multiprocessors at 1.83 GHz, half a byte a weight at 3.35 TB/s."""
    budget = 132 * 4 * 32 * 1.83e9 / (3.35e12 / 0.5)
    assert budget == pytest.approx(4.61, abs=0.005)
    assert sum(name != "mov.b32" for name, _ in instructions(ptx)) == count
    assert count / WEIGHTS_A_WORD < budget / 3


def in_pairs(tensor: tl.tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The interpreter's 16 bits each, broadcast; neighbours are the halves of 32 bits. It makes bfloat16 of an integer by
    leaving the integer's bits as they are (`interpreter.py:cast_impl`, Triton 3.7 and 3.9): here they become the number's."""
    bits = torch.tensor(np.broadcast_to(tensor.handle.data.view(np.int16), shape).reshape(-1, 2))
    pairs = to_bits(bits, torch.bfloat16) if tensor.dtype == tl.bfloat16 else bits.long() & 0xFFFF
    return pairs[:, 1] << 16 | pairs[:, 0]


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Triton's, two neighbours at once, with the text above; in float32, which the interpreter multiplies."""
    assert pack == 2
    assert constraints.value == W4A16.CONSTRAINTS.value
    kind = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}[dtype[0]]
    shape = np.broadcast_shapes(*(each.handle.data.shape for each in args))
    results = run_ptx(asm.value, kind, *(in_pairs(each, shape) for each in args))
    handles = [TensorHandle(each.float().numpy().reshape(shape), tl.float32) for each in results]
    return tuple(tl.tensor(handle, tl.block_type(tl.float32, list(shape))) for handle in handles)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_kernel_with_its_ptx_equals_the_specification(kind, monkeypatch):
    monkeypatch.setattr(tl, "inline_asm_elementwise", inline_asm_elementwise)
    monkeypatch.setattr(W4A16, "by_ptx", lambda **arguments: W4A16.run("lop3", **arguments), raising=False)
    prove_cases(W4A16, kind, "by_ptx")


def test_a_launch_on_a_gpu_runs_the_ptx(monkeypatch):
    methods = []
    monkeypatch.setattr(W4A16, "run", lambda method, *_: methods.append(method))
    monkeypatch.setattr(W4A16.triton.knobs.runtime, "interpret", False)
    W4A16.launch(**fresh(W4A16, torch.float16, W4A16.CASES[0]))
    assert methods == ["lop3"]


def test_results_never_share_a_register_with_an_argument_that_is_read_later():
    """`&`: a result is written before all arguments are read."""
    assert W4A16.CONSTRAINTS.value.split(",") == ["=&r"] * 4 + ["r"] * 3


COMPILE = """
import dataclasses, json, sys
from minivllm_kernels import gpu, report
kernel = gpu.load("w4a16_matmul")
for method in ("conversion", "lop3"):
    build = dataclasses.replace(kernel.AOT[0], constants=dict(kernel.AOT[0].constants) | {"METHOD": method})
    print(json.dumps(report.compile_for(kernel, build, report.HOPPER).asm["ptx"]))
"""


def compiled() -> list[str]:
    """PTX for Hopper of the first rung and of `launch`."""
    kernels = Path(gpu.__path__[0]).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(kernels), *sys.path])}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_compiled_makes_weights_with_lop3_in_registers_and_converts_none():
    first, last = compiled()
    conversion, magic = "cvt.rn.f16.s16", "0x000f000f, 0x64006400, 0xea"
    assert conversion in first
    assert magic not in first
    assert conversion not in last
    assert last.count(magic) == 16  # 64 weights a thread and chunk, of them half in lower nibbles, two at once
    products = [line for line in last.splitlines() if "wgmma.mma_async" in line]
    # the left operand is four registers, not an address in shared memory
    assert products
    assert all(line.count("{") == 2 for line in products)
