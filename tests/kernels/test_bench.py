"""The bench of the kernels, without a GPU: kernels run in Triton's interpreter, and a made-up clock says how long."""

import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed")

from minivllm_kernels import bench, gpu
from minivllm_kernels.bench import Lab, Result
from minivllm_kernels.gpu.form import Timed

CPU = torch.device("cpu")
CEILINGS = {"copy": 4e12, "matmul": 8e14}
ABOUT = {"machine": {"card": "a card", "driver": "1", "torch": "2", "triton": "3"}, "ceilings": CEILINGS}


@dataclass
class MadeUp:
    """A clock on which every run of every job takes as long; does the job once a call."""

    seconds: float = 1.0
    calls: list[int] = field(default_factory=list)

    def times(self, job: Callable[[], object], count: int) -> list[float]:
        job()
        self.calls.append(count)
        return [self.seconds] * count


def lab(seconds: float = 1.0, capability: int = 90) -> Lab:
    return Lab(CPU, MadeUp(seconds), capability, CEILINGS)


def exact(kernel: types.ModuleType) -> torch.dtype:
    """The most exact dtype that a kernel is tested with."""
    return min(kernel.TOL, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 1)


def small(kernel: types.ModuleType) -> types.ModuleType:
    """A kernel that is timed at the size of its first case, and tried at that only."""
    copy = types.ModuleType(kernel.__name__)
    copy.__dict__.update(kernel.__dict__)
    copy.CASES = kernel.CASES[:1]
    copy.TOL = {exact(kernel): kernel.TOL[exact(kernel)]}
    copy.BENCH = tuple(replace(timed, sizes=kernel.CASES[0], dtype=exact(kernel)) for timed in kernel.BENCH)
    return copy


@pytest.fixture
def toys(monkeypatch) -> dict[str, types.ModuleType]:
    """All kernels, at sizes for the interpreter; a test may spoil some."""
    kernels = {name: small(gpu.load(name)) for name in gpu.kernel_names()}
    monkeypatch.setattr(gpu, "load", kernels.__getitem__)
    return kernels


def here(seconds: float = 1.0) -> Callable[[str, float], Sequence[Result]]:
    return lambda name, limit: list(bench.bench_kernel(name, lab(seconds)))


def numbers(result: Result) -> list[float | None]:
    return [result.us, result.rate, result.share, result.torch_us, result.times_torch]


@pytest.mark.parametrize("name", gpu.kernel_names())
def test_every_kernel_says_what_to_time_by_sizes_that_fit_its_functions(name):
    kernel = gpu.load(name)
    for timed in kernel.BENCH:
        assert kernel.bytes_moved(timed.dtype.itemsize, **timed.sizes) > 0
        assert timed.dtype in kernel.TOL
        assert timed.ceiling in CEILINGS
        assert set(kernel.SIZES) <= set(timed.sizes)
        assert len(timed.label) < 50


@pytest.mark.parametrize("name", gpu.kernel_names())
def test_inputs_are_made_where_they_are_used(name):
    with torch.device("meta"):
        arguments = gpu.load(name).inputs(exact(gpu.load(name)), None, **gpu.load(name).CASES[0])
    assert {value.device.type for value in arguments.values() if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("name", [name for name in gpu.kernel_names() if hasattr(gpu.load(name), "torch_op")])
def test_what_a_kernel_is_compared_with_does_the_same_job(name):
    kernel = gpu.load(name)
    for sizes in kernel.CASES:
        mine, theirs = (bench.arguments(kernel, exact(kernel), sizes, CPU) for _ in range(2))
        got = kernel.torch_op(**theirs)()
        kernel.ref(**mine)
        near = max(1e-5, kernel.TOL[exact(kernel)])
        torch.testing.assert_close(got, mine[kernel.WRITES[-1]], rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("name", ["paged_prefill", "unified_attention"])
@pytest.mark.parametrize(("rows", "new", "past"), [(3, 1, 70), (2, 20, 50), (2, 20, 0)])
def test_attention_is_compared_with_the_same_job_where_no_row_is_padding_and_tokens_are(name, rows, new, past):
    kernel = gpu.load(name)
    sizes = {"rows": rows, "new": new, "past": past, "kv_heads": 2, "group": 3, "dim": 24, "block_size": 16}
    sizes |= {"window": None, "ragged": False}
    mine, theirs = (bench.arguments(kernel, torch.float32, sizes, CPU) for _ in range(2))
    kernel.ref(**mine)
    torch.testing.assert_close(kernel.torch_op(**theirs)(), mine["out"], rtol=1e-5, atol=1e-5)


def test_rows_of_one_token_are_compared_with_one_call_for_all(monkeypatch):
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or attention(*a, **k)
    )
    kernel = gpu.load("unified_attention")
    sizes = kernel.BENCH[1].sizes | {"past": 70, "dim": 16}
    kernel.torch_op(**bench.arguments(kernel, torch.float32, sizes, CPU))()
    assert len(calls) == 1


def test_nearly_all_tokens_are_forbidden_where_nearly_all_writes_are_counted():
    kernel = gpu.load("apply_bitmask")
    (timed,) = kernel.BENCH
    arguments = bench.arguments(kernel, timed.dtype, timed.sizes | {"batch": 4, "masks": 4}, CPU)
    kernel.ref(**arguments)
    assert arguments["logits"].isneginf().float().mean() > 0.999
    assert arguments["logits"].isfinite().any()


def test_a_run_has_a_row_of_every_kernel_size_and_rung_in_the_table_and_in_the_file(toys, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert bench.run(list(toys), here(), ABOUT, out) == 0
    table, kept = capsys.readouterr().out, json.loads(out.read_text())
    assert kept["machine"] == ABOUT["machine"]
    assert kept["ceilings"] == CEILINGS
    wanted = [
        (name, launch, timed.label)
        for name, kernel in toys.items()
        for launch in ["launch", *(rung.__name__ for rung in getattr(kernel, "LADDER", ()))]
        for timed in (kernel.BENCH if launch == "launch" else kernel.BENCH[:1])
    ]
    rows = [Result(**row) for row in kept["results"]]
    assert [(row.kernel, row.launch, row.label) for row in rows] == wanted
    assert all(row.status == "ok" and row.us == 1e6 for row in rows)
    assert all(bench.row(row) in table for row in rows)
    assert "a card" in table
    assert "copy 4000 GB/s, matmul 800.0 TFLOP/s" in table


def test_a_wrong_kernel_is_refused_and_not_timed_and_the_rest_goes_on(toys, capsys):
    toys["silu_mul"].launch = lambda gate_up, out: out.zero_()
    results = []
    assert (
        bench.run(["rope", "silu_mul", "store_kv"], lambda *a: results.extend(new := here()(*a)) or new, ABOUT, None)
        == 1
    )
    assert [(row.kernel, row.status) for row in results if row.status != "ok"] == [("silu_mul", "wrong")]
    (wrong,) = [row for row in results if row.status == "wrong"]
    assert numbers(wrong) == [None] * 5
    assert "out at tokens 3, inner 77" in wrong.why
    assert "WRONG" in capsys.readouterr().out


def test_a_kernel_that_is_right_in_its_cases_but_wrong_at_the_size_timed_is_refused(toys):
    kernel, right = toys["silu_mul"], toys["silu_mul"].launch
    kernel.BENCH = (Timed("large", {"tokens": 2, "inner": 1000}, dtype=torch.float32),)
    kernel.launch = lambda gate_up, out: right(gate_up, out) if out.shape[1] == 77 else out.zero_()
    (result,) = bench.bench_kernel("silu_mul", lab())
    assert (result.status, result.us) == ("wrong", None)


def test_a_kernel_that_writes_its_inputs_is_refused(toys):
    right = toys["silu_mul"].launch
    toys["silu_mul"].launch = lambda gate_up, out: right(gate_up, out) or gate_up.zero_()
    (result,) = bench.bench_kernel("silu_mul", lab())
    assert result.status == "wrong"
    assert "gate_up at" in result.why


def test_running_out_of_memory_in_one_size_leaves_the_others_and_is_an_error_in_the_end(toys, capsys):
    kernel, right = toys["rope"], toys["rope"].inputs
    kernel.BENCH = (replace(kernel.BENCH[0], sizes=kernel.CASES[0] | {"heads": 999}), kernel.BENCH[1])

    def inputs(dtype, generator, **sizes):
        if sizes["heads"] == 999:
            raise torch.OutOfMemoryError("no 9 GiB left")
        return right(dtype, generator, **sizes)

    kernel.inputs = inputs
    assert bench.run(["rope"], here(), ABOUT, None) == 1
    table = capsys.readouterr().out
    assert "ERROR" in table
    assert "OutOfMemoryError: no 9 GiB left" in table
    assert [row.status for row in bench.bench_kernel("rope", lab())] == ["error", "ok"]


def test_a_failure_of_torchs_operator_is_an_error_that_keeps_the_kernels_own_time(toys):
    toys["silu_mul"].torch_op = lambda gate_up, out: 1 / 0
    (result,) = bench.bench_kernel("silu_mul", lab())
    assert (result.status, result.us, result.torch_us) == ("error", 1e6, None)


def test_rungs_are_checked_and_timed_like_the_kernel_itself(toys):
    def v1(gate_up, out):
        raise RuntimeError("rung one broke")

    toys["silu_mul"].v1, toys["silu_mul"].LADDER = v1, (v1,)
    first, last = bench.bench_kernel("silu_mul", lab())
    assert (first.launch, first.status) == ("launch", "ok")
    assert (last.launch, last.status) == ("v1", "error")


def test_a_kernel_that_is_not_compiled_for_a_card_is_skipped_there_and_says_why(toys):
    results = list(bench.bench_kernel("paged_decode", lab(capability=75)))
    assert {row.status for row in results} == {"skipped"}
    assert all("no tensor-core instruction" in row.why and numbers(row) == [None] * 5 for row in results)


SILU = gpu.load("silu_mul")
HALF = Timed("", {"tokens": 1000, "inner": 1000}, goal=0.5)  # 6 MB, 4 MFLOP


@pytest.mark.parametrize(
    ("timed", "seconds", "rate", "share", "met"),
    [
        (HALF, 3e-6, 2e12, 0.5, True),
        (HALF, 4e-6, 1.5e12, 0.375, False),
        (replace(HALF, goal=None), 4e-6, 1.5e12, 0.375, None),
        (replace(HALF, ceiling="matmul"), 1e-8, 4e14, 0.5, True),
    ],
)
def test_rate_and_share_follow_from_the_time_and_the_ceiling(timed, seconds, rate, share, met):
    result = bench.judged(Result("silu_mul", "launch", ""), SILU, timed, seconds, CEILINGS)
    assert result.us == pytest.approx(1e6 * seconds)
    assert result.rate == pytest.approx(rate)
    assert result.share == pytest.approx(share)
    assert result.met is met


def test_a_share_that_no_card_can_reach_is_an_error_and_no_goal_met():
    result = bench.judged(Result("silu_mul", "launch", ""), SILU, HALF, 1e-6, CEILINGS)
    assert (result.status, result.met) == ("error", None)
    assert "150% of the ceiling" in result.why


class MadeUpGpu:
    """A queue of work that is done when the CPU waits for it: filling the cache takes 50 s, a job 3, 4, 5... s."""

    def __init__(self):
        self.queue, self.time, self.jobs = [], 0.0, 0

    def install(self, monkeypatch):
        monkeypatch.setattr(torch, "zeros", lambda *_, device: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: MadeUpEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def sum(self):
        self.queue.append(50.0)

    def job(self):
        self.queue.append(3.0 + self.jobs)
        self.jobs += 1

    def wait(self):
        for work in self.queue:
            if isinstance(work, MadeUpEvent):
                work.at = self.time
            else:
                self.time += work
        self.queue.clear()


class MadeUpEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, math.nan

    def record(self):
        self.gpu.queue.append(self)

    def elapsed_time(self, end):
        """Milliseconds; not a number before both were reached."""
        return 1e3 * (end.at - self.at)


def test_the_clock_of_a_gpu_times_each_run_alone_after_filling_the_cache(monkeypatch):
    made_up = MadeUpGpu()
    made_up.install(monkeypatch)
    assert bench.GpuClock().times(made_up.job, 3) == [3.0, 4.0, 5.0]
    assert made_up.time == 3 * 50 + 3 + 4 + 5


def test_runs_on_a_gpu_are_all_queued_before_the_cpu_waits(monkeypatch):
    made_up, waits = MadeUpGpu(), []
    made_up.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(made_up.jobs) or made_up.wait())
    bench.GpuClock().times(made_up.job, 3)
    assert waits == [3]


def test_ceilings_are_bytes_read_and_written_and_flops_by_the_clock():
    found = bench.measure_ceilings(MadeUp(0.5), CPU, copied=1000, side=16, dtype=torch.float32)
    assert found == {"copy": 4000, "matmul": 2 * 16**3 / 0.5}


def test_the_time_is_the_median_and_fits_the_budget():
    class Jumpy(MadeUp):
        def times(self, job, count):
            return [0.1 if n % 3 else 9.0 for n in range(len(super().times(job, count)))]

    clock = Jumpy()
    assert bench.median_time(clock, lambda: None, budget=1.0) == 0.1
    assert clock.calls == [bench.WARM_UP, bench.WARM_UP, 10]


@pytest.mark.parametrize(("seconds", "count"), [(1e-6, bench.MOST), (100.0, bench.FEWEST)])
def test_runs_are_neither_too_many_nor_too_few(seconds, count):
    clock = MadeUp(seconds)
    bench.median_time(clock, lambda: None)
    assert clock.calls[-1] == count


def test_a_number_is_shown_only_if_it_was_measured():
    line = bench.row(Result("a", "launch", "some sizes", status="error", why="broken", goal=0.8))
    assert line.split() == ["a", "some", "sizes", "-", "-", "-", "80%", "ERROR", "-", "-", "broken"]


def test_kernels_not_reached_in_time_are_errors_and_the_limit_of_one_is_what_is_left(capsys):
    limits = []

    def slow(name, limit):
        limits.append(limit)
        return [Result(name, "launch", "x")]

    ticks = iter([0.0, 10.0, 90.0, 101.0])
    assert bench.run(["a", "b", "c"], slow, ABOUT, None, now=lambda: next(ticks), limit=100) == 1
    assert limits == [90, 10]
    assert "not reached in 100 s" in capsys.readouterr().out


def test_a_kernel_whose_process_ends_is_an_error_that_says_what_it_complained_of():
    """There's no GPU for it here, so it ends at once."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (result,) = bench.in_own_process("rope", CEILINGS, limit=60)
    assert (result.kernel, result.status) == ("rope", "error")
    assert "CUDA" in result.why


def test_a_kernel_that_hangs_is_an_error_after_its_time():
    (result,) = bench.in_own_process("rope", CEILINGS, limit=0.01)
    assert (result.status, result.why) == ("error", "not done after 0 s")


def test_all_launches_are_compiled_ahead_within_one_limit(monkeypatch):
    calls = []
    monkeypatch.setattr(bench, "said_by", lambda call, limit: calls.append((call, limit)) or ("", "a wrong address"))
    bench.compile_ahead(["rope", "paged_prefill"], limit=9)
    assert all(0 < limit <= 9 for _, limit in calls)
    assert sorted(call.split("gpu.load")[1] for call, _ in calls) == [
        f"('{name}'), '{launch}', bench.torch.device('cuda'))"
        for name, launch in [
            ("paged_prefill", "launch"),
            ("paged_prefill", "v1"),
            ("paged_prefill", "v2"),
            ("rope", "launch"),
        ]
    ]
    calls.clear()
    bench.compile_ahead(["rope"], limit=0)
    assert not calls


def test_what_compiles_ahead_is_a_call_that_works(monkeypatch):
    run, answers = bench.said_by, []

    def on_the_cpu(call, limit):
        answers.append(run(f"gpu.load('rope'); print(bench.{call.replace('cuda', 'cpu')})", limit))
        return answers[-1]

    monkeypatch.setattr(bench, "said_by", on_the_cpu)
    bench.compile_ahead(["rope"])
    assert answers == [("None\n", "")], "nothing is wrong with it"


def test_kernels_with_goals_are_timed_before_those_without():
    assert bench.goals_first(["rope", "silu_mul", "store_kv"]) == ["silu_mul", "store_kv", "rope"]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(bench.__file__).parents[1]), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        [sys.executable, "-m", "minivllm_kernels.bench", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )


def test_without_a_gpu_it_says_what_to_do_and_writes_nothing(tmp_path):
    done = command(OUT=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "run this on a machine with one" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["1", "true", "on"])
def test_the_interpreter_is_not_timed(value, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert "Unset it" in bench.no_gpu()


def test_json_goes_to_the_file_named_or_else_to_the_folder_out(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    assert bench.options([]) == (gpu.kernel_names(), None)
    assert bench.options(["rope", "--out", "x.json"]) == (["rope"], Path("x.json"))
    monkeypatch.setenv("OUT", "folder")
    assert bench.options([])[1] == Path("folder/kernels.json")


def test_a_kernel_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.options(["warp_drive"])
    assert "warp_drive" in capsys.readouterr().err


def test_sizes_timed_are_far_larger_than_a_cache():
    for name in gpu.kernel_names():
        for timed in gpu.load(name).BENCH:
            if timed.goal and timed.ceiling == "copy":
                moved = gpu.load(name).bytes_moved(timed.dtype.itemsize, **timed.sizes)
                assert math.log10(moved) > 8
