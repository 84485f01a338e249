"""Check and time the Triton kernels on a GPU: `python -m minivllm_kernels.bench [KERNEL...] [--out FILE]`.

The card's ceilings come first, measured in the same run: bytes/s of a large copy, FLOP/s of a large matrix product in
bfloat16. Then every kernel and every rung of its ladder must equal its specification, at its `CASES` and at the sizes
timed; only then is it timed, and held to its share of the ceiling (`BENCH`) and to torch's own operator for the same job.
A time is the median of runs between two events on the GPU's own clock, its level-2 cache holding nothing of theirs.

Exit status: 0, also if goals aren't met; 1 if something is wrong, fails or isn't reached in time; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from minivllm_kernels import gpu
from minivllm_kernels.bench_rows import Result, heading, row
from minivllm_kernels.gpu import ops

if TYPE_CHECKING:
    from minivllm_kernels.gpu.form import Timed

LIMIT = 440.0
"""Seconds for the whole run: kernels not begun by then are said not to have been reached."""
KERNEL_LIMIT = 200.0
"""Seconds for one kernel, so that one that hangs leaves time for the others."""
COMPILE_LIMIT = 120.0
"""Seconds for compiling ahead. What isn't compiled by then is when it's checked."""
BUDGET = 0.5
"""Seconds of runs behind one time."""
WARM_UP, FEWEST, MOST = 3, 5, 100
FLUSH = 2**30
"""Bytes read before each run. Reading leaves nothing in the cache that the run would have to write back, and takes long
enough for the CPU to have the run queued when it's over."""
IMPOSSIBLE = 1.25
"""A share of the ceiling that isn't believed. Reading alone is somewhat faster than copying, but not by so much."""

Job = Callable[[], object]


class Clock(Protocol):
    """What times a job on a device."""

    def times(self, job: Job, count: int) -> list[float]:
        """Do the job `count` times; seconds of each."""


class GpuClock:
    """CUDA events around each run, after the level-2 cache was filled with something else."""

    def __init__(self) -> None:
        self.other = torch.zeros(FLUSH // 4, device="cuda")

    def times(self, job: Job, count: int) -> list[float]:
        """Runs are queued one behind the other; the CPU waits after the last."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            self.other.sum()
            begin.record()
            job()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


@dataclass(frozen=True)
class Lab:
    """Where kernels run, what times them, and the ceilings found there: by name, bytes/s or FLOP/s."""

    where: torch.device
    clock: Clock
    capability: int
    ceilings: Mapping[str, float]


def median_time(clock: Clock, job: Job, budget: float = BUDGET) -> float:
    """Seconds that a job takes: the median of as many runs as the budget allows, within bounds, after a warm-up."""
    clock.times(job, WARM_UP)
    about = statistics.median(clock.times(job, WARM_UP))
    return statistics.median(clock.times(job, min(MOST, max(FEWEST, int(budget / about)))))


def measure_ceilings(
    clock: Clock, where: torch.device, copied: int = FLUSH, side: int = 8192, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Bytes/s read and written by a copy of so many bytes, FLOP/s of a product of square matrices."""
    source = torch.zeros(copied, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy = 2 * copied / median_time(clock, lambda: target.copy_(source))
    # zeros would take less power than numbers do, and so allow a higher clock
    a, b = torch.randn(2, side, side, dtype=dtype, device=where)
    product = torch.empty_like(a)
    return {"copy": copy, "matmul": 2 * side**3 / median_time(clock, lambda: torch.mm(a, b, out=product))}


def arguments(kernel: ModuleType, dtype: torch.dtype, sizes: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """A kernel's inputs, made on the device: some are gigabytes."""
    with where:
        return kernel.inputs(dtype, torch.Generator(where).manual_seed(0), **sizes)


def check(kernel: ModuleType, launch: str, dtype: torch.dtype, sizes: Mapping[str, Any], where: torch.device) -> None:
    """Raise `AssertionError` unless a launch leaves what `ref` leaves, within `TOL`, and all else alone."""
    mine, wanted = (arguments(kernel, dtype, sizes, where) for _ in range(2))
    getattr(kernel, launch)(**mine)
    kernel.ref(**wanted)
    at = ", ".join(f"{size} {value}" for size, value in sizes.items())
    for name, value in mine.items():
        if isinstance(value, Tensor):
            near = kernel.TOL[dtype] if name in kernel.WRITES else 0
            said = f"{name} at {at} in {dtype}: {{}}".format
            torch.testing.assert_close(value, wanted[name], rtol=near, atol=near, equal_nan=True, msg=said)


def judged(blank: Result, kernel: ModuleType, timed: Timed, seconds: float, ceilings: Mapping[str, float]) -> Result:
    """A result with what follows from a time."""
    moved = kernel.bytes_moved(timed.dtype.itemsize, **timed.sizes)
    rate = (kernel.flops(**timed.sizes) if timed.ceiling == "matmul" else moved) / seconds
    share = rate / ceilings[timed.ceiling]
    met = None if timed.goal is None else share >= timed.goal
    result = replace(blank, us=1e6 * seconds, rate=rate, share=share, met=met)
    if share > IMPOSSIBLE:
        return replace(result, status="error", met=None, why=f"{share:.0%} of the ceiling: its job is miscounted")
    return result


def failed(result: Result, error: Exception) -> Result:
    """A result with what went wrong, in one line."""
    status = "wrong" if isinstance(error, AssertionError) else "error"
    return replace(result, status=status, why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])


def timed_result(kernel: ModuleType, blank: Result, timed: Timed, lab: Lab) -> Result:
    """Check and time one launch at one size."""
    result = blank
    try:
        check(kernel, blank.launch, timed.dtype, timed.sizes, lab.where)
        given = arguments(kernel, timed.dtype, timed.sizes, lab.where)
        seconds = median_time(lab.clock, lambda: getattr(kernel, blank.launch)(**given))
        result = judged(blank, kernel, timed, seconds, lab.ceilings)
        if blank.launch == "launch" and hasattr(kernel, "torch_op"):
            theirs = 1e6 * median_time(lab.clock, kernel.torch_op(**given))
            result = replace(result, torch_us=theirs, times_torch=theirs / (1e6 * seconds))
        return result
    except Exception as error:
        return failed(result, error)


def check_cases(kernel: ModuleType, launch: str, where: torch.device) -> Exception | None:
    """What's wrong with a launch at `CASES` in some dtype; None if nothing is."""
    try:
        for dtype in kernel.TOL:
            for sizes in kernel.CASES:
                check(kernel, launch, dtype, sizes, where)
    except Exception as error:
        return error
    return None


def excuse(kernel: ModuleType, capability: int) -> str:
    """Why a kernel doesn't run on a compute capability at all, or ""."""
    reasons = [build.not_on.get(capability, "") for build in kernel.AOT]
    return reasons[0] if all(reasons) else ""


def launches(kernel: ModuleType) -> list[str]:
    """What a kernel's file can launch. The ladder has no goals: if time is short, it's what isn't reached."""
    return ["launch", *(rung.__name__ for rung in getattr(kernel, "LADDER", ()))]


def goals_first(names: Sequence[str]) -> list[str]:
    """Kernels that have goals before those that have none."""
    return sorted(names, key=lambda name: all(timed.goal is None for timed in gpu.load(name).BENCH))


def bench_kernel(name: str, lab: Lab) -> Iterator[Result]:
    """All rows of a kernel: its `launch` at all its sizes, then rungs of its ladder, `v1` first, at the first of them."""
    kernel = gpu.load(name)
    why = excuse(kernel, lab.capability)
    for launch in launches(kernel):
        fault = None if why else check_cases(kernel, launch, lab.where)
        for timed in kernel.BENCH if launch == "launch" else kernel.BENCH[:1]:
            blank = Result(name, launch, timed.label, ceiling=timed.ceiling, goal=timed.goal)
            if why:
                yield replace(blank, status="skipped", why=why)
            else:
                yield failed(blank, fault) if fault else timed_result(kernel, blank, timed, lab)


def child(name: str, ceilings: Mapping[str, float]) -> None:
    """Print a kernel's rows as JSON, one a line, as they come."""
    lab = Lab(torch.device("cuda"), GpuClock(), capability_here(), ceilings)
    for result in bench_kernel(name, lab):
        print(json.dumps(dataclasses.asdict(result)), flush=True)
        torch.cuda.empty_cache()


def said_by(call: str, limit: float) -> tuple[str, str]:
    """What a call of a function of this file prints in a process of its own, and why it failed, or "".

    A wrong address ends all GPU work of a process, and a kernel may hang."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"from minivllm_kernels import bench; bench.{call}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complaint = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"not done after {limit:.0f} s"
    if not process.returncode:
        return said, ""
    return said, (complaint.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]


def in_own_process(name: str, ceilings: Mapping[str, float], limit: float) -> list[Result]:
    """A kernel's rows, and one more if something ended its process."""
    said, why = said_by(f"child({name!r}, {dict(ceilings)!r})", limit)
    results = [Result(**json.loads(line)) for line in said.splitlines() if line.startswith("{")]
    return [*results, Result(name, "launch", "", status="error", why=why)] if why else results


def compile_ahead(names: Sequence[str], limit: float = COMPILE_LIMIT) -> None:
    """Leave in Triton's cache what checks at `CASES` run, compiled by as many processes as there are processors. What fails
    here isn't reported: it fails again when it's checked."""
    end = time.monotonic() + limit

    def compile_one(job: tuple[str, str]) -> None:
        if (left := end - time.monotonic()) > 0:
            said_by("check_cases(bench.gpu.load({!r}), {!r}, bench.torch.device('cuda'))".format(*job), left)

    jobs = [(name, launch) for name in names for launch in launches(gpu.load(name))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, jobs))


def capability_here() -> int:
    """The compute capability of the GPU, as in `sm_90`."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def machine() -> dict[str, str]:
    """The card, its driver, torch and Triton."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    card = f"{torch.cuda.get_device_name()} (sm_{capability_here()})"
    return {"card": card, "driver": driver, "torch": torch.__version__, "triton": importlib.metadata.version("triton")}


Bench = Callable[[str, float], Sequence[Result]]
"""A kernel's rows, within so many seconds."""


def run(
    names: Sequence[str],
    bench: Bench,
    about: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    now: Callable[[], float] = time.monotonic,
    limit: float = LIMIT,
) -> int:
    """Bench kernels on a machine with ceilings (`about`), print rows and write `out` as they come; the exit status."""
    end, results = now() + limit, list[Result]()
    print(heading(about))
    for name in names:
        left = end - now()
        late = Result(name, "launch", "", status="error", why=f"not reached in {limit:.0f} s")
        new = bench(name, min(left, KERNEL_LIMIT)) if left > 0 else [late]
        results += new
        print("\n".join(map(row, new)), flush=True)
        if out:
            kept = [dataclasses.asdict(result) for result in results]
            out.write_text(json.dumps({**about, "results": kept}, indent=1) + "\n", encoding="utf-8")
    return int(any(result.status in ("wrong", "error") for result in results))


def no_gpu() -> str:
    """Why nothing can be timed here and what to do about it, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed: pip install 'minivllm[kernels]' (Linux)."
    if ops.interpreted():
        return "TRITON_INTERPRET is set: kernels would run on the CPU. Unset it."
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no NVIDIA GPU: run this on a machine with one, with a CUDA build of torch. "
            "Without one, `python -m pytest tests/kernels` runs the kernels in Triton's interpreter and "
            "`python -m minivllm_kernels.report` compiles them for Hopper."
        )
    return ""


def options(argv: Sequence[str] | None) -> tuple[list[str], Path | None]:
    """The kernels to bench, all if none is named, and where to write JSON: `--out`, or kernels.json in the folder `OUT`."""
    parser = argparse.ArgumentParser(prog="python -m minivllm_kernels.bench", description="Check and time the kernels.")
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="which kernels (default: all)")
    parser.add_argument("--out", type=Path, help="write JSON here (default: $OUT/kernels.json if OUT is set)")
    given = parser.parse_args(argv)
    if unknown := set(given.kernels) - set(gpu.kernel_names()):
        parser.error(f"no kernel is named {', '.join(sorted(unknown))}; there are {', '.join(gpu.kernel_names())}")
    folder = os.environ.get("OUT")
    return given.kernels or gpu.kernel_names(), given.out or (Path(folder) / "kernels.json" if folder else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time; the exit status."""
    begin, (names, out) = time.monotonic(), options(argv)
    if why := no_gpu():
        print(why, file=sys.stderr)
        return 2
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    ceilings = measure_ceilings(GpuClock(), torch.device("cuda"))
    torch.cuda.empty_cache()
    names = goals_first(names)
    compile_ahead(names)
    about: dict[str, Mapping[str, Any]] = {"machine": machine(), "ceilings": ceilings}
    left = LIMIT - (time.monotonic() - begin)
    return run(names, lambda name, limit: in_own_process(name, ceilings, limit), about, out, limit=left)


if __name__ == "__main__":
    sys.exit(main())
