"""Run code that may do anything in forked processes with limits, and believe only what arrives through a pipe.

Each job is a fork of this process (so what is imported here is warm there) in a session of its own: a time limit watched
from here, other limits kept by the kernel (`minivllm.course.confine`), and an end that takes its whole family: process
group, children that left it, orphans.

Lines count only if they begin with a secret that the job's own code got as an argument. A job has finished well only if it
said so at its end and then left with status 0: everything else is an end of its own, named in `Outcome`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minivllm.course import confine
from minivllm.course.confine import Cage, Limits
from minivllm.course.records import End

Emit = Callable[[str], None]
Work = Callable[[Emit], None]

OUTPUT_BYTES = 16 << 10
"""How much of what a job prints is kept: the end."""


@dataclass(slots=True)
class Outcome:
    """How a job ended, the lines it emitted, and the end of what it printed."""

    end: End
    reason: str
    lines: list[str]
    output: str
    seconds: float


@dataclass(slots=True)
class Job:
    """A job that runs."""

    index: int
    pid: int
    limits: Limits
    cage: Cage
    folder: str
    secret: bytes
    records: int
    output: int
    started: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    killed: tuple[End, str] | None = None
    checked: float = 0.0


def run_jobs(works: Sequence[tuple[Work, Limits]], at_once: int = 1) -> list[Outcome]:
    """Run all jobs, some at a time; outcomes in the order of the jobs."""
    confine.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of a job become our children, so that we find them
    waiting = list(enumerate(works))[::-1]
    running: dict[int, Job] = {}
    outcomes: dict[int, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, (work, limits) = waiting.pop()
                job = _start(index, work, limits)
                running[job.pid] = job
            _wait_for_news(list(running.values()))
            for job in list(running.values()):
                if (status := _exit_status(job)) is not None:
                    del running[job.pid]
                    outcomes[job.index] = _finish(job, status, set(running))
    finally:
        for job in running.values():
            confine.kill_family(job.pid, job.cage)
            os.waitpid(job.pid, 0)
            _clean_up(job)
    return [outcomes[index] for index in range(len(works))]


# starting


def _start(index: int, work: Work, limits: Limits) -> Job:
    cage = confine.make_cage(limits)
    folder = tempfile.mkdtemp(prefix="minivllm-grade-")
    if cage.uid is not None:
        os.chown(folder, cage.uid, cage.uid)
    records, records_in = os.pipe()
    output, output_in = os.pipe()
    secret = secrets.token_hex(16).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_job(work, limits, cage, folder, secret, records_in, output_in)
    for fd in (records_in, output_in):
        os.close(fd)
    for fd in (records, output):
        os.set_blocking(fd, False)
    return Job(index, pid, limits, cage, folder, secret, records, output)


def _be_the_job(work: Work, limits: Limits, cage: Cage, folder: str, secret: bytes, records: int, output: int) -> None:
    """The forked child: never returns."""
    status = 1
    try:
        os.setsid()
        _keep_only(records, output)
        confine.confine_self(limits, cage)
        os.chdir(folder)
        os.environ |= {"HOME": folder, "TMPDIR": folder}
        emit = _emitter(records, secret)
        work(emit)
        emit("end")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _keep_only(records: int, output: int) -> None:
    """No input, both outputs into one pipe, and no other file of the grader's but the pipe for records."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for fd in range(3, 1024):
        if fd != records:
            with contextlib.suppress(OSError):
                os.close(fd)


def _emitter(fd: int, secret: bytes, write: Callable[[int, bytes], int] = os.write) -> Emit:
    """Writes lines to the parent. A process that was forked off ends instead of speaking for this one."""
    own = os.getpid()

    def emit(line: str) -> None:
        if os.getpid() != own:
            os._exit(1)
        data = secret + b" " + line.encode() + b"\n"
        while data:
            data = data[write(fd, data) :]

    return emit


# watching


def _wait_for_news(jobs: list[Job]) -> None:
    """Read what jobs send, for a moment at most, and end those that are over a limit."""
    with selectors.DefaultSelector() as selector:
        for job in jobs:
            for fd, store in ((job.records, job.received), (job.output, job.printed)):
                selector.register(fd, selectors.EVENT_READ, store)
        ready = selector.select(0.02)
    for key, _ in ready:
        _read(key.fd, key.data)
    for job in jobs:
        del job.printed[:-OUTPUT_BYTES]
        _watch(job)


def _read(fd: int, store: bytearray) -> bool:
    """Take what there is; False at the end or when there is nothing now."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False
    store += data
    return bool(data)


def _watch(job: Job) -> None:
    now = time.monotonic()
    if job.killed is not None or now - job.checked < 0.2:
        return
    job.checked = now
    if now - job.started > job.limits.seconds:
        _kill(job, End.OUT_OF_TIME, f"took more than {job.limits.seconds:g} s")
        return
    members = confine.family(job.pid)
    if len(members) > job.limits.processes + 1:
        _kill(job, End.TOO_MANY_PROCESSES, f"started more than {job.limits.processes} processes")
    elif len(members) > 1 and sum(map(confine.resident_bytes, members)) > job.limits.memory_bytes:
        _kill(job, End.OUT_OF_MEMORY, f"used more than {job.limits.memory_bytes >> 20} MiB in all its processes")


def _kill(job: Job, end: End, reason: str) -> None:
    job.killed = end, reason
    confine.kill_family(job.pid, job.cage)


# ending


def _exit_status(job: Job) -> int | None:
    """The wait status of a job that has ended, or None."""
    pid, status = os.waitpid(job.pid, os.WNOHANG)
    return status if pid else None


def _finish(job: Job, status: int, running: set[int]) -> Outcome:
    seconds = time.monotonic() - job.started
    confine.kill_family(job.pid, job.cage)
    confine.bury_strays(running)
    for fd, store in ((job.records, job.received), (job.output, job.printed)):
        while _read(fd, store):
            pass
    _clean_up(job)
    prefix = job.secret + b" "
    lines = [line[len(prefix) :].decode() for line in bytes(job.received).splitlines() if line.startswith(prefix)]
    output = bytes(job.printed[-OUTPUT_BYTES:]).decode(errors="replace")
    end, reason = job.killed or _judge(lines, status)
    return Outcome(end, reason, [line for line in lines if line != "end"], output, seconds)


def _clean_up(job: Job) -> None:
    for fd in (job.records, job.output):
        os.close(fd)
    shutil.rmtree(job.folder, ignore_errors=True)
    confine.remove_cage(job.cage)


def _judge(lines: list[str], status: int) -> tuple[End, str]:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return End.EXITED, f"the process was ended by {signal.Signals(-code).name}"
    if code or lines[-1:] != ["end"]:
        return End.EXITED, f"the process left with exit status {code} before grading was done"
    return End.FINISHED, ""
