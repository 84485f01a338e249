"""Every Triton kernel equals its specification in torch, touches nothing else, and refuses wrong arguments.

One file for all: what to try is said by the kernels' files (`minivllm_kernels/gpu/form.py`).
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton isn't installed")

from minivllm_kernels import gpu

KERNELS = {name: gpu.load(name) for name in gpu.kernel_names()}
GUARD = 4096
"""Elements around every tensor that nothing may read or write."""

NAN = float("nan")
POISONS = (NAN, 7.0)

SECTIONS = (
    "def ref(", "@triton.jit\ndef kernel(", "def launch(", "WRITES = ", "SIZES = ", "CASES = ", "FREE", "TOL = ",
    "def inputs(", "AOT = ", "def bytes_moved(", "def flops(",
)  # fmt: skip

Arguments = dict[str, object]

FAULTS = {
    "store_kv": [
        ("if slot >= 0:", "if slot >= -1:"),
        ("tl.int64) * HEADS", "tl.int64) * (HEADS - 1)"),
        ("(head < HEADS) &", "(head < HEADS + 1) &"),
    ],
    "copy_blocks": [
        ("offset < RUN), offset < RUN", "offset < RUN), offset < RUN - 1"),
        ("tl.load(sources + pair)", "tl.load(sources)"),
    ],
    "rmsnorm": [
        ("mask = element < SIZE", "mask = element < SIZE - 1"),
        ("mask = element < SIZE", "mask = element < SIZE + 1"),
        ("/ SIZE + eps", "/ BLOCK + eps"),
        ("value = added.to(value.dtype)", "value = value"),
    ],
    "silu_mul": [
        ("mask = element < INNER", "mask = element < INNER - 1"),
        ("2 * INNER + INNER + element", "2 * INNER + element"),
        ("1 + tl.exp(-gate)", "1 + tl.exp(gate)"),
    ],
    "rope": [
        ("a * c - b * s, b * c + a * s", "a * c - b * s, b * c - a * s"),
        ("tl.store(first, (a * c - b * s)", "tl.store(first, (a * c + b * s)"),
        ("cos_stride + angle", "cos_stride + 0 * angle"),
        ("(head[:, None] < HEADS) &", "(head[:, None] < HEADS + 1) &"),
    ],
    "apply_bitmask": [
        ("(token < vocab)", "(token <= vocab)"),
        ("& 1) == 0", "& 1) == 1"),
        ("tl.load(rows + mask_row)", "mask_row"),
    ],
    "paged_decode": [
        ("(position < length)", "(position < length - 1)"),
        ("(position < length)", "(position <= length)"),
        ("(position >= first)", "(position >= first - 1)"),
        ('tl.where(live[None, :], scores, float("-inf"))', "scores"),
        ("acc * rescale[:, None]", "acc"),
        ("total * rescale +", "total +"),
        ("kv_head * GROUP + in_group", "kv_head + in_group * KV_HEADS"),
        ("position // BLOCK_SIZE, live", "start // BLOCK_SIZE + 0 * position, live"),
    ],
    "paged_prefill": [
        ("(position[None, :] <= at[:, None])", "(position[None, :] < at[:, None])"),
        ("(position[None, :] <= at[:, None])", "(position[None, :] <= at[:, None] + 1)"),
        ("> at[:, None] - window)", ">= at[:, None] - window)"),
        ("(position < stop)", "(position <= stop)"),
        ('tl.where(seen & live[None, :], scores, float("-inf"))', "scores"),
        ("acc * rescale[:, None]", "acc"),
        ("total * rescale +", "total +"),
        ("edge = (lowest + 1)", "edge = (lowest + TILE)"),
        ("(stop - window + TILE - 1, 0)", "(stop - window, 0)"),
        ("tl.maximum(inner, edge), stop,", "edge, stop,"),
        ("kv_head = head // (HEADS // KV_HEADS)", "kv_head = head % KV_HEADS"),
        ("table = tables + row * table_stride", "table = tables"),
        ("(first_query + in_tile < count)", "(first_query + in_tile <= count)"),
        ("[BLOCK_M], -1e30,", '[BLOCK_M], float("-inf"),'),
    ],
    "unified_attention": [
        ("// TOKENS + middle > tile", "// TOKENS + middle >= tile"),
        ("// TOKENS + middle > tile", "// TOKENS > tile"),
        ("(packed // group) + rows if", "(packed // group) + rows - 2 if"),
        ("kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP", "kv_head + tl.arange(0, BLOCK_M) % GROUP * KV_HEADS"),
        ("& (first_query + in_tile < count)", ""),
        ("at = lowest + in_tile", "at = lowest + tl.arange(0, BLOCK_M)"),
        ("tl.minimum(lowest + TOKENS, length)", "tl.minimum(lowest + TOKENS - 1, length)"),
        ("- begin // TOKENS - row", "- begin // TOKENS - row + 1"),
        ("table = tables + row * table_stride", "table = tables"),
        ("tl.maximum(inner, edge), stop,", "edge, stop,"),
    ],
}
"""What a kernel might say by mistake, and must then fail: (right, wrong)."""


def fresh(kernel: types.ModuleType, dtype: torch.dtype, sizes: dict, seed: int = 0) -> Arguments:
    return kernel.inputs(dtype, torch.Generator().manual_seed(seed), **sizes)


def tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def guarded(tensor: torch.Tensor, poison: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a tensor, strides and all, in the middle of memory full of poison (-1 if it's integers), and that memory."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    fill = poison if tensor.is_floating_point() else -1
    memory = torch.full((GUARD + max(extent, 0) + GUARD,), fill, dtype=tensor.dtype)
    view = memory.as_strided(tensor.shape, tensor.stride(), GUARD)
    return view.copy_(tensor), memory


def same(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def prove(
    kernel: types.ModuleType,
    dtype: torch.dtype,
    sizes: dict,
    seed: int = 0,
    poison: float = NAN,
    launch: str = "launch",
) -> None:
    """Launch with guards around every tensor; results, inputs and guards must be what `ref` leaves.

    NaN around what is read shows up in results. A number around what is written (`poison`) shows what is written by
    mistake, be it NaN; NaN there shows what an in-place kernel reads.
    """
    mine, theirs, memory, memory_wanted = fresh(kernel, dtype, sizes, seed), fresh(kernel, dtype, sizes, seed), {}, {}
    for name, tensor in tensors(mine).items():
        around = poison if name in kernel.WRITES else NAN
        mine[name], memory[name] = guarded(tensor, around)
        theirs[name], memory_wanted[name] = guarded(tensor, around)
    getattr(kernel, launch)(**mine)
    kernel.ref(**theirs)
    for name in memory:
        same(memory[name], memory_wanted[name], kernel.TOL[dtype] if name in kernel.WRITES else 0)


def prove_cases(kernel: types.ModuleType, dtype: torch.dtype, launch: str = "launch") -> None:
    for sizes in kernel.CASES:
        for poison in POISONS:
            prove(kernel, dtype, sizes, poison=poison, launch=launch)


every_kernel = pytest.mark.parametrize("name", KERNELS)


@every_kernel
def test_a_file_has_its_sections(name):
    kernel = KERNELS[name]
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    starts = [source.index(f"\n{section}") for section in SECTIONS]
    assert starts == sorted(starts)
    assert all(set(case) == set(kernel.SIZES) for case in kernel.CASES)


@every_kernel
def test_equals_its_specification_in_all_cases(name):
    for dtype in KERNELS[name].TOL:
        prove_cases(KERNELS[name], dtype)


@every_kernel
@given(data=st.data())
def test_equals_its_specification_in_cases_nobody_thought_of(name, data):
    kernel = KERNELS[name]
    sizes = {size: data.draw(st.sampled_from(values), size) for size, values in kernel.SIZES.items()}
    dtype, poison = data.draw(st.sampled_from(list(kernel.TOL))), data.draw(st.sampled_from(POISONS))
    prove(kernel, dtype, sizes, data.draw(st.integers(0, 99), "seed"), poison)


RUNGS = [(name, rung.__name__) for name, kernel in KERNELS.items() for rung in getattr(kernel, "LADDER", ())]


@pytest.mark.parametrize(("name", "rung"), RUNGS)
def test_a_rung_of_a_ladder_equals_the_specification_too_and_says_what_it_fixes(name, rung):
    assert getattr(KERNELS[name], rung).__doc__
    for dtype in KERNELS[name].TOL:
        prove_cases(KERNELS[name], dtype, rung)


def wrong_tensors(kernel: types.ModuleType, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor spoiled in each way, with what is wrong with it."""
    yield "dtype", tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)
    yield "device", tensor.to("meta")
    yield "rank", tensor[None]
    apart = torch.stack((tensor, tensor), -1)[..., 0]
    yield "stride", apart
    for dimension in range(tensor.dim()):
        if (name, dimension) not in kernel.FREE:
            yield f"size of dimension {dimension}", torch.cat((tensor, tensor.narrow(dimension, 0, 1)), dimension)


@contextmanager
def raises_naming(arguments: str, what: str) -> Iterator[None]:
    """The block raises a `ValueError` that begins with the name of one of these arguments."""
    said = "nothing was raised"
    try:
        yield
    except ValueError as error:
        said = str(error)
    assert re.match(rf"({arguments}): ", said), f"{what}: {said}"


@every_kernel
def test_a_wrong_tensor_is_refused_by_name_before_anything_is_written(name):
    kernel = KERNELS[name]
    dtype = torch.float32
    right = fresh(kernel, dtype, kernel.CASES[0])
    for argument, tensor in tensors(right).items():
        for what, wrong in wrong_tensors(kernel, argument, tensor):
            arguments = fresh(kernel, dtype, kernel.CASES[0]) | {argument: wrong}
            before = {name: value.clone() for name, value in tensors(arguments).items()}
            # where several arguments share a size, any of them may be the one that's blamed
            blamed = argument if what in ("device", "stride", "rank") else "|".join(right)
            with raises_naming(blamed, f"{name}, {argument} with a wrong {what}"):
                kernel.launch(**arguments)
            for other, value in tensors(arguments).items():
                if value.device.type == "cpu":
                    same(value, before[other])


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("copy_blocks", "block_size", 0),
        ("copy_blocks", "block_size", 7),
        ("paged_decode", "block_size", 0),
        ("paged_decode", "block_size", 7),
        ("paged_decode", "window", 0),
        ("unified_attention", "block_size", 7),
        ("unified_attention", "window", 0),
        ("paged_prefill", "block_size", 7),
        ("paged_prefill", "window", 0),
        ("paged_prefill", "longest", -1),
        ("paged_prefill", "longest", 1000),
    ],
)
def test_a_wrong_number_is_refused_by_name(name, argument, value):
    arguments = fresh(KERNELS[name], torch.float32, KERNELS[name].CASES[0])
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        KERNELS[name].launch(**arguments | {argument: value})


def mutant(kernel: types.ModuleType, right: str, wrong: str, folder) -> types.ModuleType:
    """A kernel's file with one thing said otherwise."""
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    assert right in source
    path = folder / "mutant.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash((right, wrong)))}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "right", "wrong"), [(name, *fault) for name in FAULTS for fault in FAULTS[name]])
def test_a_fault_is_caught_by_the_cases(name, right, wrong, tmp_path):
    faulty = mutant(KERNELS[name], right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        prove_cases(faulty, torch.float32)


def at_the_end_of_memory(*files: str) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("end_of_memory.py")
    return subprocess.run([sys.executable, script, *files], capture_output=True, text=True, timeout=100)


def test_nothing_past_the_end_is_touched_not_even_to_be_masked_afterwards():
    done = at_the_end_of_memory(*(kernel.__file__ for kernel in KERNELS.values()))
    assert done.returncode == 0, done.stderr


def test_a_read_past_the_end_that_leaves_no_trace_is_caught(tmp_path):
    right = "tl.load(gate_up + row * 2 * INNER + INNER + element, mask, other=0.0)"
    faulty = mutant(KERNELS["silu_mul"], right, right.replace(", mask, other=0.0", ""), tmp_path)
    prove_cases(faulty, torch.float32)
    assert at_the_end_of_memory(faulty.__file__).returncode == -signal.SIGSEGV


def test_every_kernel_has_seeded_faults():
    assert set(FAULTS) == set(KERNELS)


@pytest.mark.parametrize("name", ["store_kv", "copy_blocks"])
def test_offsets_into_a_cache_are_64_bits_wide(name):
    """A cache of 2**32 + elements, of which a few are ever touched."""
    kv_heads, slots, dim = 2, 2**26, 16
    cache = torch.empty(2 * kv_heads, slots, dim, dtype=torch.int8)
    last = slots - 16
    k, v = torch.ones(1, kv_heads, dim, dtype=torch.int8), torch.full((1, kv_heads, dim), 2, dtype=torch.int8)
    KERNELS["store_kv"].launch(k, v, torch.tensor([last]), cache)
    if name == "copy_blocks":
        source, destination = torch.tensor([last // 16]), torch.tensor([last // 16 - 1])
        KERNELS["copy_blocks"].launch(cache, source, destination, 16)
        last -= 16
    assert cache[:, last, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill", "unified_attention"])
def test_a_cache_is_read_with_offsets_64_bits_wide(name):
    """The last head's values lie past 2**31 elements."""
    kv_heads, slots, dim = 2, 2**25 + 2**20, 16
    cache = torch.empty(2 * kv_heads, slots, dim, dtype=torch.bfloat16)
    last = slots // 16 - 1
    cache[:, -16:] = torch.arange(4)[:, None, None]
    q, out = torch.ones(1, kv_heads, dim, dtype=torch.bfloat16), torch.zeros(1, kv_heads, dim, dtype=torch.bfloat16)
    step = {"block_size": 16} if name == "paged_decode" else {"block_size": 16, "starts": torch.tensor([0, 1])}
    step |= {"longest": 1} if name == "paged_prefill" else {}
    tables, lengths = torch.tensor([[last]]), torch.tensor([16])
    KERNELS[name].launch(q=q, cache=cache, tables=tables, lengths=lengths, out=out, **step)
    assert out[0, :, 0].tolist() == [2, 3]


def test_kernels_import_triton_and_nothing_else_does():
    code = "import sys, minivllm_kernels.cpu, minivllm_kernels.gpu; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
