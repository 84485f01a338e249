"""Limits for a process that may do anything, and ways to end it with all that it started. For `minivllm.course.sandbox`.

Memory and file size are limited by the kernel for every user, the number of processes for every user but root. So where the
grader is root, a job runs as a user of its own that owns nothing; where such a user could not read the course or Python, in
a cgroup; and where there is none, counting from outside must do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from minivllm.course.manifest import ROOT

FILE_BYTES = 64 << 20
FIRST_SPARE_UID = 61_184
"""Start of the range that systemd sets aside for users that exist only for a moment."""

CGROUPS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
"""Where cgroups that count processes are made: version 1, version 2."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a job may use: wall-clock seconds, bytes of memory, processes and threads beside its own."""

    seconds: float
    memory_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Cage:
    """What holds a job's processes together: a user, or a cgroup, or neither."""

    uid: int | None = None
    cgroup: Path | None = None


def make_cage(limits: Limits) -> Cage:
    """The strongest there is here. A grader that isn't root needs none: the kernel's limit binds its processes."""
    if os.geteuid() != 0:
        return Cage()
    if spare_user_works():
        return Cage(uid=FIRST_SPARE_UID + secrets.randbelow(4000))
    return Cage(cgroup=_make_cgroup(limits.processes + 1))


def weak_spot() -> str | None:
    """What protection is missing here, as a sentence for the instructor; None if nothing is."""
    if os.geteuid() == 0 and not spare_user_works():
        return "the grader runs as root from a folder that other users can't read, so graded code runs as root too"
    return None


@functools.cache
def spare_user_works() -> bool:
    """Whether a user of its own could read Python and the course."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(FIRST_SPARE_UID)
        os.setuid(FIRST_SPARE_UID)
        needed = [sys.executable, os.__file__, str(ROOT), *filter(os.path.exists, sys.path)]
        os._exit(0 if all(os.access(path, os.R_OK) for path in needed) else 1)
    return os.waitpid(pid, 0)[1] == 0


def _make_cgroup(processes: int) -> Path | None:
    for parent in CGROUPS:
        folder = parent / f"minivllm-{secrets.token_hex(8)}"
        try:
            folder.mkdir()
            (folder / "pids.max").write_text(str(processes))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
        else:
            return folder
    return None


def confine_self(limits: Limits, cage: Cage) -> None:
    """Put this process under the limits and into the cage, for good."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    with contextlib.suppress(ValueError, OSError):  # not kept by macOS
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    processes = limits.processes + 1
    if cage.cgroup is not None:
        (cage.cgroup / "cgroup.procs").write_text("0")
    if cage.uid is not None:
        os.setgroups([])
        os.setgid(cage.uid)
        os.setuid(cage.uid)
    else:
        processes += _threads_of(os.getuid())
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the grader


def _threads_of(uid: int) -> int:
    """How many threads a user runs: the kernel's limit counts all of them."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == uid else 0
    return count


def prctl(option: int, value: int) -> None:
    """Linux's `prctl` with one argument; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def resident_bytes(process: psutil.Process) -> int:
    """Memory that a process has in use; 0 if it is gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def kill_family(pid: int, cage: Cage) -> None:
    """End a job: its process group, its descendants, and everything in its cage."""
    members = family(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if cage.uid is not None:
        _kill_user(cage.uid)
    if cage.cgroup is not None:
        _kill_cgroup(cage.cgroup)


def _kill_user(uid: int) -> None:
    """End every process of a user at once, which outruns a fork loop."""
    pid = os.fork()
    if pid == 0:
        os.setgid(uid)
        os.setuid(uid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


def _kill_cgroup(folder: Path) -> None:
    """End every process in a cgroup; its limit keeps a fork loop small enough to catch."""
    for _ in range(200):
        try:
            pids = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
        except OSError:
            return
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def remove_cage(cage: Cage) -> None:
    """Take away what `make_cage` made, once all processes in it are gone."""
    if cage.cgroup is None:
        return
    for _ in range(100):
        try:
            cage.cgroup.rmdir()
        except OSError:  # busy until the kernel has done away with the last process
            time.sleep(0.01)
        else:
            return


def bury_strays(known: set[int]) -> None:
    """End and reap children of this process that are not known: orphans that came to us."""
    for _ in range(100):
        strays = [child for child in psutil.Process().children() if child.pid not in known]
        if not strays:
            return
        for stray in strays:
            for process in family(stray.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray.pid, 0)
