"""Triton kernels, one file each, all of one form (`form.py`), and what the engine calls (`ops.py`). Importing this package
or `ops` imports no Triton; a kernel's file does."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

NOT_KERNELS = {"form", "ops"}


def kernel_names() -> list[str]:
    """The names of all kernels: this package's files but the form and the way in."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in NOT_KERNELS)


def load(name: str) -> ModuleType:
    """The file of a kernel; raises `ImportError` where Triton isn't installed."""
    return importlib.import_module(f"{__name__}.{name}")
