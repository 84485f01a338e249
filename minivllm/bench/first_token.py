"""W5: seconds from the start of a process to the first byte on its stdout, and the peak memory of its process tree."""

from __future__ import annotations

import subprocess
import threading
import time

import psutil  # type: ignore[import-untyped]

from minivllm.config import MinivllmError

SAMPLE_SECONDS = 0.02


class BenchError(MinivllmError):
    """A measured process failed."""


def tree_rss_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, in MB (10^6 bytes); 0 once it is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(map(_rss, family)) / 1e6


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


class PeakMemory(threading.Thread):
    """Samples a process tree's memory every 20 ms until `finish`, which returns the peak in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self._peak = 0.0

    def run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, tree_rss_mb(self._pid))

    def finish(self) -> float:
        self._done.set()
        self.join()
        return self._peak


def measure_process(command: list[str]) -> dict[str, float]:
    """Run a command to its end: `first_token_s` and `peak_rss_mb`. It must write nothing to stdout before its first token.

    Raises `BenchError`, with what it said on stderr, if it fails or writes nothing.
    """
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        memory = PeakMemory(process.pid)
        memory.start()
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, complaint = process.communicate()
        peak = memory.finish()
    if process.returncode or not first:
        raise BenchError(f"{' '.join(command)} ended with {process.returncode}: {complaint.decode(errors='replace')}")
    return {"first_token_s": seconds, "peak_rss_mb": peak}
