"""`doctor` says what it found and what to do, and its exit code says whether the engine can run."""

import importlib.metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.cli import doctor
from minivllm.cli.app import app
from minivllm.cli.doctor import Verdict
from minivllm.models import fetch


def run():
    return CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})


def test_it_names_versions_device_dtype_and_model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    result = run()
    assert result.exit_code == 0
    for part in ("torch", "tokenizers", "device", "dtype", "attention", str(tmp_path), "not there yet"):
        assert part in result.stdout


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        if name == "safetensors":
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = run()
    assert result.exit_code == 1
    assert "safetensors" in result.stdout
    assert "make setup" in result.stdout
    assert "can't run yet" in result.stdout


def test_a_model_that_is_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "MODEL_BYTES", 5)
    (tmp_path / Path(fetch.MEMBER).name).write_bytes(b"GGUF!")
    assert list(doctor.model_cache())[-1].verdict is Verdict.OK


def test_a_cache_without_room_can_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(fetch, "FETCH_BYTES", 10**18)
    finding = list(doctor.model_cache())[-1]
    assert finding.verdict is Verdict.MISSING
    assert "make room" in finding.advice


def test_without_a_home_folder_there_is_no_cache(homeless):
    (finding,) = doctor.model_cache()
    assert finding.verdict is Verdict.MISSING
    assert "set it to a folder you can write to" in finding.found


def test_cpu_flags_are_read_as_linux_lists_them(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    assert doctor.cpu_flags(info) == {"fpu", "avx2", "avx512_bf16"}
    assert doctor.cpu_flags(tmp_path / "none") is None


def test_without_bfloat16_products_it_says_what_that_means(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert "float32" in doctor.cpu().advice
