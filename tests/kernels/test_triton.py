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
from minivllm_kernels.gpu import form

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
        ("/ SIZE + eps", "/ SIZE"),
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
        ("(position < end)", "(position < end - 1)"),
        ("(position < end)", "(position <= end)"),
        ("(position >= first)", "(position >= first - 1)"),
        ('tl.where(live[None, :], scores, float("-inf"))', "scores"),
        ("acc * rescale[:, None]", "acc"),
        ("total * rescale +", "total +"),
        ("kv_head * GROUP + in_group", "kv_head + in_group * 2"),
        ("position // BLOCK_SIZE, live", "tl.min(position, 0) // BLOCK_SIZE + 0 * position, live"),
    ],
    "paged_decode_splitkv": [
        ("tl.minimum(start + piece, length)", "tl.minimum(start + piece - 1, length)"),
        ("tl.minimum(start + piece, length)", "tl.minimum(start + piece + 1, length)"),
        ("tl.cdiv(tl.cdiv(length - begin, TILE), splits)", "((length - begin) // TILE // splits)"),
        ("tl.where(total == 0, 1.0, total)\n    head,", "total\n    head,"),
        ("largest + tl.log2(total)", "largest"),
        ("results * shares[:, None]", "results"),
        ("tl.load(lse + written, ", "tl.load(lse + row * splits * HEADS + head + 0 * split, "),
        ("tl.load(lse + written, ", "tl.load(lse + written - HEADS * (split > 0), "),
        ('split < splits, other=float("-inf")', "split < splits, other=0.0"),
        ('tl.where(largest == float("-inf"), 0.0, largest)', "largest"),
        ("/ tl.where(total == 0, 1.0, total)\n    tl.store(out", "/ 1.0\n    tl.store(out"),
    ],
    "w4a16_matmul": [
        ("halves >> (4 * NIBBLE)", "halves >> (12 - 4 * NIBBLE)"),
        ("2 * word + nibble // 4", "word + 16 * (nibble // 4)"),
        ("if zeros is not None and", "if False and"),
        ("(64 + zero).to(DOT)", "(64 + 0 * zero).to(DOT)"),
        ("* 0.0625", "* 0.125"),
        ("group_row = start // GROUP", "group_row = first // GROUP"),
        ("tl.where(start < depth, outputs, 0)", "outputs"),
        ("& (k < depth)", "& (k < depth + 1)"),
        ("partial * scale[:, None]\n                partial = ", "partial * scale[:, None]\n                unused = "),
        ("n_mask[:, None] & (token[None, :] <", "(n <= outputs)[:, None] & (token[None, :] <"),
        ("(token[None, :] < tokens)", "(token[None, :] <= tokens)"),
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
        ("edge = (lowest + 1)", "edge = (lowest + 2)"),
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
        ("query, in_tile, ", "query, tl.arange(0, BLOCK_M), "),
        ("TOKENS, BLOCK_M, DIM", "TOKENS - 1, BLOCK_M, DIM"),
        ("- begin // TOKENS - row", "- begin // TOKENS - row + 1"),
        ("table = tables + row * table_stride", "table = tables"),
    ],
}
"""What a kernel might say by mistake, and must then fail: (right, wrong)."""


def fresh(kernel: types.ModuleType, dtype: torch.dtype, sizes: dict, seed: int = 0) -> Arguments:
    return kernel.inputs(dtype, torch.Generator().manual_seed(seed), **sizes)


def finest(kernel: types.ModuleType) -> torch.dtype:
    """The dtype of most bits of those a kernel has."""
    return torch.float32 if torch.float32 in kernel.TOL else torch.float16


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


@given(st.integers(1, 300), st.sampled_from((None, 1, 100)), st.integers(2, 12))
def test_any_number_of_splits_gives_the_same_result(longest, window, splits):
    kernel = KERNELS["paged_decode_splitkv"]
    sizes = {"rows": 2, "kv_heads": 1, "group": 3, "dim": 16, "block_size": 16, "longest": longest, "window": window}
    one, many = (fresh(kernel, torch.float32, sizes | {"splits": n}) for n in (1, splits))
    kernel.launch(**one)
    kernel.launch(**many)
    same(many["out"], one["out"], kernel.TOL[torch.float32])


def test_pieces_that_nothing_was_read_for_are_written_too(monkeypatch):
    kernel = KERNELS["paged_decode_splitkv"]
    monkeypatch.setattr(torch, "empty", lambda *shape, **kinds: torch.full(shape, NAN, **kinds))
    prove_cases(kernel, torch.float32)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "longest_slots", "splits"),
    [
        (1, 8, 32768, 49),  # 392 programs, three for each of 132 multiprocessors but four
        (1, 1, 32768, 64),  # the most there may be
        (4, 8, 32768, 12),
        (4, 8, 2048, 8),  # pieces of 256
        (64, 8, 32768, 1),
        (1, 8, 255, 1),
        (0, 8, 32768, 64),
    ],
)
def test_splits_fill_the_multiprocessors_unless_pieces_get_too_short(rows, kv_heads, longest_slots, splits):
    assert KERNELS["paged_decode_splitkv"].pick_splits(rows, kv_heads, longest_slots, 132) == splits


def test_the_ladder_says_how_many_bytes_heads_of_a_group_ask_for():
    """A row of 4096 slots, 32 heads of 128 on 8, in bf16, in MB: v3's, v2's, and v1's, which reads K twice."""
    job = {"rows": 1, "dim": 128, "longest": 4096, "window": None}
    shared = KERNELS["paged_decode"].bytes_moved(2, kv_heads=8, group=4, **job) / 1e6
    apart = KERNELS["paged_decode"].bytes_moved(2, kv_heads=32, group=1, **job) / 1e6
    assert [round(shared), round(apart), round(1.5 * apart)] == [17, 67, 101]


def wrong_tensors(kernel: types.ModuleType, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor spoiled in each way, with what is wrong with it."""
    yield "dtype", tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)
    yield "device", tensor.to("meta")
    yield "rank", tensor[None]
    yield "stride", torch.stack((tensor, tensor), -1)[..., 0]
    if tensor.dim() == 3 and tensor.shape[1] > 1:
        yield "stride", torch.stack((tensor, tensor), 2)[:, :, 0]
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
    dtype = finest(kernel)
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
        ("paged_decode_splitkv", "block_size", 7),
        ("paged_decode_splitkv", "splits", 0),
        ("paged_decode_splitkv", "splits", 65),
        ("w4a16_matmul", "group_size", 0),
        ("w4a16_matmul", "group_size", 16),
        ("w4a16_matmul", "group_size", 64),
        ("unified_attention", "block_size", 7),
        ("unified_attention", "window", 0),
        ("paged_prefill", "block_size", 7),
        ("paged_prefill", "window", 0),
        ("paged_prefill", "longest", -1),
        ("paged_prefill", "longest", 1000),
    ],
)
def test_a_wrong_number_is_refused_by_name(name, argument, value):
    arguments = fresh(KERNELS[name], finest(KERNELS[name]), KERNELS[name].CASES[0])
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        KERNELS[name].launch(**arguments | {argument: value})


def test_more_rows_than_a_grid_has_are_refused_by_name():
    rows, none = 2**16, torch.empty(0, 1, 16)
    tables, lengths, starts = torch.zeros(rows, 1).long(), torch.zeros(rows).long(), torch.zeros(rows + 1).long()
    with pytest.raises(ValueError, match=r"^lengths: 65536 rows, .*65535"):
        KERNELS["paged_prefill"].launch(none, torch.empty(2, 16, 16), tables, lengths, starts, none.clone(), 16, 0)


def test_a_gpu_that_is_not_the_current_one_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first, second = (types.SimpleNamespace(device=torch.device("cuda", index)) for index in range(2))
    assert form.check_device("q", first) == first.device
    with pytest.raises(ValueError, match=r"^q: must be on the current GPU, cuda:0, not on cuda:1"):
        form.check_device("q", second)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 0), (1, 1), True),
        ((3, 0, 4), (4, 4, 1), True),
        ((2, 1, 3), (3, 99, 1), True),
        ((2, 2), (1, 2), False),
        ((2, 3), (4, 1), False),
        ((3,), (0,), False),
    ],
)
def test_only_elements_and_their_order_say_whether_a_tensor_is_dense(shape, strides, dense):
    assert form.is_dense(torch.empty(12).as_strided(shape, strides), 0) == dense


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
        prove_cases(faulty, finest(faulty))


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


def test_kernels_import_triton_and_nothing_else_does():
    code = "import sys, minivllm_kernels.cpu, minivllm_kernels.gpu; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
