"""Compile kernels.cpp on first use, for the very processor it will run on, and keep the result.

No build system and no header but the standard library's: one call of a compiler, about two seconds, and `ctypes` to call
what comes out. The library shares torch's OpenMP threads: torch has loaded its libgomp before, under the same name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
OPTIMISE = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fPIC")
COMPILERS = ("g++", "clang++", "c++")


class KernelsUnavailable(RuntimeError):
    """The C++ kernels can't be built or loaded here; the message says why."""


@cache
def why_not(device: str = "cpu") -> str | None:
    """Why there are no C++ kernels for models on a device ("cpu", "cuda"), or None if there are. Builds them if need be."""
    if device != "cpu":
        return f"the model runs on {device}"
    try:
        library()
    except KernelsUnavailable as reason:
        return str(reason)
    return None


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises `KernelsUnavailable` without a compiler, or if what it makes can't be loaded."""
    import torch  # noqa: F401  its OpenMP runtime must be the one in the process

    compiler = find_compiler()
    key = hashlib.sha256(SOURCE.read_bytes() + describe_target(compiler)).hexdigest()[:16]
    try:
        target = cache_dir() / "kernels" / f"kernels-{key}.so"
        if not target.exists():
            compile_to(target, compiler)
        return ctypes.CDLL(str(target))
    except KernelsUnavailable:
        raise
    except (OSError, RuntimeError) as error:
        raise KernelsUnavailable(f"{error}; $MINIVLLM_CACHE names a folder for what is compiled") from error


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, which may have arguments ("ccache g++"), else the first compiler that is there.
    Raises `KernelsUnavailable` if there is none."""
    given = os.environ.get("CXX", "").split()
    for program, *arguments in [given] if given else [[name] for name in COMPILERS]:
        if path := shutil.which(program):
            return [path, *arguments]
    looked_for = f"$CXX is {' '.join(given)}" if given else "g++ or clang++; $CXX names another"
    raise KernelsUnavailable(f"no C++ compiler here ({looked_for})")


def describe_target(compiler: list[str]) -> bytes:
    """What decides whether a build fits: the compiler's version and the processor's features, as its macros have them."""
    done = subprocess.run(
        [*compiler, *OPTIMISE, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, check=False
    )
    if done.returncode:
        raise KernelsUnavailable(f"{shlex.join(compiler)} does not work: {last_line(done.stderr)}")
    return done.stdout


def cache_dir() -> Path:
    """Where what was fetched or compiled lives: $MINIVLLM_CACHE, or `minivllm` in the platform's cache folder.

    Raises `RuntimeError` if that's below the home folder and there is none.
    """
    if chosen := os.environ.get("MINIVLLM_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "minivllm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minivllm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm"


def compile_to(target: Path, compiler: list[str]) -> None:
    """Compile into place, whole or not at all: several processes may do so at once. One thread where OpenMP is missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        for openmp in (["-fopenmp"], ["-Wno-unknown-pragmas"]):
            done = subprocess.run(
                [*compiler, *OPTIMISE, *openmp, "-shared", "-o", str(made), str(SOURCE)],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                made.replace(target)
                return
        raise KernelsUnavailable(f"{shlex.join(compiler)} can't compile {SOURCE.name}: {last_line(done.stderr)}")


def last_line(output: bytes) -> str:
    """The last line that a program wrote."""
    return (output.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
