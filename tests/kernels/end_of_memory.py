"""Run kernels' cases on tensors that end where a page without any rights begins: `python end_of_memory.py FILE...`.

A read past a tensor's end that's masked afterwards leaves no trace in results; here it ends the process.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import ctypes
import importlib.util
import mmap
import sys
import types

import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "kernels"))

libc = ctypes.CDLL(None, use_errno=True)
NO_RIGHTS = 0


def fenced(tensor: torch.Tensor) -> tuple[torch.Tensor, mmap.mmap]:
    """A copy of a tensor, strides and all, whose last byte is the last before a page without rights; and its memory."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = max(extent, 0) * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    fence = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), NO_RIGHTS):
        raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return tensor.clone(), memory
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=room - size, count=size).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor), memory


def load(path: str) -> types.ModuleType:
    """A kernel's file as a module."""
    spec = importlib.util.spec_from_file_location("kernel_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(kernel: types.ModuleType) -> None:
    """All cases of a kernel, every tensor before a fence."""
    for sizes in kernel.CASES:
        dtype = torch.float32 if torch.float32 in kernel.TOL else torch.float16
        arguments = kernel.inputs(dtype, torch.Generator().manual_seed(0), **sizes)
        fences = {name: fenced(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        kernel.launch(**arguments | {name: tensor for name, (tensor, _) in fences.items()})


for path in sys.argv[1:]:
    run(load(path))
