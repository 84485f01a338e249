"""What Triton's interpreter and small tensors don't show of themselves: offsets past 32 bits, programs in another order,
waits for the GPU."""

import math
import tempfile

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.test_triton import KERNELS, RUNGS, every_kernel, finest, fresh, mutant, prove_cases, same, tensors


def sparse(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they're touched, after as many more: where offsets that wrapped around lead."""
    count = math.prod(shape)
    with tempfile.NamedTemporaryFile() as file:
        memory = torch.from_file(file.name, shared=True, size=2 * count, dtype=dtype)
    return memory[count:].view(shape)


@pytest.mark.parametrize("name", ["store_kv", "copy_blocks"])
def test_offsets_into_a_cache_are_64_bits_wide(name):
    """Both the last K plane and the last V plane begin past 2**31 elements, and all have 2**30."""
    kv_heads, slots, dim = 3, 2**26, 16
    cache = sparse(2 * kv_heads, slots, dim, dtype=torch.int8)
    last = slots - 16
    k = torch.arange(1, 4, dtype=torch.int8)[None, :, None].expand(1, kv_heads, dim).contiguous()
    KERNELS["store_kv"].launch(k, k + kv_heads, torch.tensor([last]), cache)
    if name == "copy_blocks":
        source, destination = torch.tensor([last // 16]), torch.tensor([last // 16 - 1])
        KERNELS["copy_blocks"].launch(cache, source, destination, 16)
        last -= 16
    assert cache[:, last, 0].tolist() == [1, 2, 3, 4, 5, 6]


ATTENTION_RUNGS = [rung for rung in RUNGS if rung[0].startswith("paged")]
ATTENTION = ["paged_decode", "paged_decode_splitkv", "paged_prefill", "unified_attention"]


@pytest.mark.parametrize(("name", "launch"), [*((name, "launch") for name in ATTENTION), *ATTENTION_RUNGS])
def test_a_cache_is_read_with_offsets_64_bits_wide(name, launch):
    """The last V plane begins past 2**31 elements."""
    kv_heads, slots, dim = 2, 3 * 2**24, 16
    cache = sparse(2 * kv_heads, slots, dim, dtype=torch.bfloat16)
    last = slots // 16 - 1
    cache[:, -16:] = torch.arange(4)[:, None, None]
    q, out = torch.ones(1, kv_heads, dim, dtype=torch.bfloat16), torch.zeros(1, kv_heads, dim, dtype=torch.bfloat16)
    step = {"block_size": 16} if name.startswith("paged_decode") else {"block_size": 16, "starts": torch.tensor([0, 1])}
    step |= {"splits": 2} if name == "paged_decode_splitkv" else {}
    step |= {"longest": 1} if name == "paged_prefill" else {}
    tables, lengths = torch.tensor([[last]]), torch.tensor([16])
    getattr(KERNELS[name], launch)(q=q, cache=cache, tables=tables, lengths=lengths, out=out, **step)
    assert out[0, :, 0].tolist() == [2, 3]


HEADS_1024 = {"kv_heads": 8, "dim": 128}
ROWS_1024 = {
    "rmsnorm": {"tokens": 1, "size": 1024, "add": True, "wide": True},
    "silu_mul": {"tokens": 1, "inner": 1024},
    "rope": {"tokens": 1, "heads": 8, "dim": 128, "interleaved": False},
    "store_kv": {"tokens": 1, "slots": 2, "padded": False} | HEADS_1024,
    "paged_decode": {"rows": 1, "group": 1, "block_size": 16, "longest": 16, "window": None} | HEADS_1024,
}
"""Sizes with one row, of 1024 elements."""


@pytest.mark.parametrize(
    ("name", "launch"), [*((name, "launch") for name in ROWS_1024), *(rung for rung in RUNGS if rung[0] in ROWS_1024)]
)
def test_rows_are_found_with_offsets_64_bits_wide(name, launch, monkeypatch):
    """Of so many rows only the last one's programs run; it begins at element 2**31."""
    kernel, last = KERNELS[name], 2**21
    arguments, wanted = (fresh(kernel, torch.float32, ROWS_1024[name], seed=1) for _ in range(2))
    results = tensors(arguments)
    for argument, tensor in tensors(arguments).items():
        if len(tensor) == 1:
            memory = sparse(last + 1, *tensor.shape[1:], dtype=tensor.dtype)
            results[argument], arguments[argument] = memory[last:], memory[:1]
            results[argument].copy_(tensor)

    def create_get_program_id(self, axis):
        return TensorHandle(np.array([self.grid_idx[axis] if axis else last], np.int32), tl.int32)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_get_program_id", create_get_program_id)
        getattr(kernel, launch)(**arguments)
    kernel.ref(**wanted)
    for argument in kernel.WRITES:
        same(results[argument], wanted[argument], kernel.TOL[torch.float32])


@pytest.fixture
def backwards(monkeypatch):
    """A launch's programs run last first. A GPU runs them in any order, the interpreter in one."""
    forwards = InterpreterBuilder.set_grid_idx

    def set_grid_idx(self, *program):
        forwards(self, *(size - 1 - index for size, index in zip(self.grid_dim, program, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)


@every_kernel
@pytest.mark.usefixtures("backwards")
def test_programs_give_the_same_results_in_another_order(name):
    prove_cases(KERNELS[name], finest(KERNELS[name]))


@pytest.mark.usefixtures("backwards")
def test_a_program_that_writes_what_is_anothers_is_caught(tmp_path):
    faulty = mutant(KERNELS["unified_attention"], "(in_tile < TOKENS) & ", "", tmp_path)
    with pytest.raises(AssertionError):
        prove_cases(faulty, torch.float32)


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor with which the CPU waits for a GPU, and which no graph can capture."""


@every_kernel
def test_no_launch_reads_what_a_tensor_holds(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("the CPU would wait for the GPU")

    kernel = KERNELS[name]
    for sizes in kernel.CASES:
        arguments = fresh(kernel, finest(kernel), sizes)
        with monkeypatch.context() as patch:
            for method in READS:
                patch.setattr(torch.Tensor, method, refuse)
            kernel.launch(**arguments)
