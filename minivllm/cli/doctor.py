"""`doctor`: what this machine offers the engine, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import typer

from minivllm.calc.hw import GIB
from minivllm.cli.start import spinner
from minivllm.config import ModelError

CPU_FLAGS = {
    "avx2": "vector arithmetic",
    "avx512f": "wider vectors",
    "avx512_vnni": "int8 products",
    "avx512_bf16": "bfloat16 products",
    "amx_bf16": "bfloat16 matrix tiles",
}
NEEDED = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "psutil")
ENOUGH_MEMORY = 2 * GIB
CANNOT_RUN = 1


class Verdict(StrEnum):
    """How a finding matters: fine, worth knowing, or the engine can't run."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at, what was found, and what to do about it."""

    what: str
    found: str
    verdict: Verdict = Verdict.OK
    advice: str = ""


def doctor() -> None:
    """Say which device, dtype, backend, versions and model were found, and what to do about what is missing.

    Exit code 0 when the engine can run the default model, else 1.
    """
    from rich.console import Console
    from rich.table import Table

    with spinner("looking"):
        findings = list(examine())
    table = Table(box=None, show_header=False, padding=(0, 2))
    signs = {Verdict.OK: "[green]✓[/green]", Verdict.NOTE: "[yellow]![/yellow]", Verdict.MISSING: "[red]✗[/red]"}
    for finding in findings:
        table.add_row(signs[finding.verdict], finding.what, finding.found)
        if finding.advice:
            table.add_row("", "", f"[dim]→ {finding.advice}[/dim]")
    console = Console()
    console.print(table)
    broken = any(finding.verdict is Verdict.MISSING for finding in findings)
    console.print("\n[red]The engine can't run yet: see ✗.[/red]" if broken else "\n[green]The engine can run.[/green]")
    if broken:
        raise typer.Exit(CANNOT_RUN)


def examine() -> Iterator[Finding]:
    """All findings, those that later ones need first."""
    yield python()
    packages = [package(name) for name in NEEDED]
    yield from packages
    yield triton()
    yield cpu()
    yield memory()
    if any(finding.verdict is Verdict.MISSING for finding in packages):
        return  # what follows imports them
    yield from device()
    yield from model_cache()


def python() -> Finding:
    """The interpreter and the system."""
    return Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def package(name: str) -> Finding:
    """A package that the engine can't run without."""
    try:
        return Finding(name, importlib.metadata.version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", Verdict.MISSING, "run make setup, or pip install -e .")


def triton() -> Finding:
    """Triton has wheels for Linux only, and only the chapter on kernels needs it."""
    try:
        return Finding("triton", importlib.metadata.version("triton"))
    except PackageNotFoundError:
        linux = platform.system() == "Linux"
        advice = (
            "run make setup" if linux else "the chapter on kernels needs Linux, WSL2, a container or a hosted notebook"
        )
        return Finding("triton", "not installed (only for kernels)", Verdict.NOTE, advice)


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str] | None:
    """The processor's feature flags as Linux names them; None where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def cpu() -> Finding:
    """Cores, and the instructions that decide how fast matrix products are."""
    flags, cores = cpu_flags(), f"{os.cpu_count()} cores"
    if flags is None:
        return Finding("cpu", cores)
    has = [flag for flag in CPU_FLAGS if flag in flags]
    found = f"{cores}, {', '.join(has) or 'none of ' + ', '.join(CPU_FLAGS)}"
    if "avx512_bf16" in flags or "amx_bf16" in flags or platform.machine() != "x86_64":
        return Finding("cpu", found)
    return Finding("cpu", found, Verdict.NOTE, "no bfloat16 products: float32 is used, about half as fast")


def memory() -> Finding:
    """Free memory; the default model with its cache wants about 1 GiB."""
    import psutil  # type: ignore[import-untyped]

    free = psutil.virtual_memory().available
    found = f"{free / GIB:.1f} GiB free of {psutil.virtual_memory().total / GIB:.1f}"
    if free < ENOUGH_MEMORY:
        return Finding("memory", found, Verdict.NOTE, "close something, or give --kv-cache-memory 256MiB")
    return Finding("memory", found)


def device() -> Iterator[Finding]:
    """What `--device auto` and `--dtype auto` come to, and the attention backends."""
    import torch

    from minivllm.models.decoder import resolve_device
    from minivllm.runner.attention import pick_backend
    from minivllm.runner.model_runner import default_dtype

    chosen = resolve_device("auto")
    name = torch.cuda.get_device_name() if chosen.type == "cuda" else f"{torch.get_num_threads()} threads"
    yield Finding("device", f"{chosen} ({name})")
    yield Finding("dtype", str(default_dtype()).removeprefix("torch."))
    backend = pick_backend("auto", chosen.type)
    if backend.name == "torch":
        advice = {"cpu": "install g++ or clang++ for steps that are up to twice as fast"}.get(chosen.type, "")
        yield Finding("attention", str(backend), Verdict.NOTE, advice)
    else:
        yield Finding("attention", f"{backend}; also torch, reference")


def model_cache() -> Iterator[Finding]:
    """Where models are kept, whether the default one is there, and whether it could be fetched."""
    from minivllm.models import fetch
    from minivllm.models.fetch import FETCH_BYTES, MEMBER, MODEL_BYTES

    try:
        folder = fetch.model_cache()
    except ModelError as error:
        yield Finding("model cache", str(error), Verdict.MISSING)
        return
    model = folder / Path(MEMBER).name
    yield Finding("model cache", f"{folder} (set MINIVLLM_CACHE to change it)")
    if model.is_file() and model.stat().st_size == MODEL_BYTES:
        yield Finding("default model", f"{model.name}, {MODEL_BYTES / 1e6:.0f} MB")
        return
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    if free < FETCH_BYTES:
        yield Finding("default model", f"not there, {free / 1e6:.0f} MB of disk left", Verdict.MISSING, "make room")
    elif not os.access(nearest, os.W_OK):
        yield Finding("default model", f"not there, {nearest} can't be written", Verdict.MISSING, "set MINIVLLM_CACHE")
    else:
        advice = "fetched by the first run (about 90 MB; needs pip and a network)"
        yield Finding("default model", "not there yet", Verdict.NOTE, advice)
