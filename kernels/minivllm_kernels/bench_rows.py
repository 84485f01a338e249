"""What the bench of the kernels says: its rows, and the table that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """A row of the table: `launch` or a rung of a kernel at one of its sizes. What wasn't measured is None.

    `rate` and `share` are of `ceiling`: bytes/s of "copy" or FLOP/s of "matmul". `status` is "ok", "wrong" (it doesn't
    equal its specification and isn't timed), "error" or "skipped", and `why` says why.
    """

    kernel: str
    launch: str
    label: str
    status: str = "ok"
    why: str = ""
    ceiling: str = "copy"
    goal: float | None = None
    us: float | None = None
    rate: float | None = None
    share: float | None = None
    met: bool | None = None
    torch_us: float | None = None
    times_torch: float | None = None
    """How many times as fast as torch's operator."""


HEAD = (
    f"{'kernel':26}{'sizes':50}{'us':>10}{'rate':>15}{'share':>7}{'goal':>6}  {'':8}{'torch us':>10}{'times':>7}\n"
    f"{'':26}{'':50}{'':>10}{'':>15}{'':>7}{'':>6}  {'':8}{'':>10}{'torch':>7}"
)


def shown(value: float | None, form: str) -> str:
    """A number as text, or "-" if it wasn't measured."""
    return "-" if value is None else format(value, form)


def rate_text(result: Result) -> str:
    """GB/s or TFLOP/s."""
    if result.rate is None:
        return "-"
    return f"{result.rate / 1e12:.1f} TFLOP/s" if result.ceiling == "matmul" else f"{result.rate / 1e9:.0f} GB/s"


def row(result: Result) -> str:
    """A line of the table, and a second one if there's something to say."""
    name = result.kernel if result.launch == "launch" else f"{result.kernel} {result.launch}"
    verdict = result.status.upper() if result.status != "ok" else {None: "", True: "met", False: "not met"}[result.met]
    line = (
        f"{name:26}{result.label:50}{shown(result.us, '.1f'):>10}{rate_text(result):>15}{shown(result.share, '.0%'):>7}"
        f"{shown(result.goal, '.0%'):>6}  {verdict:8}{shown(result.torch_us, '.1f'):>10}{shown(result.times_torch, '.2f'):>7}"
    )
    return f"{line}\n    {result.why}" if result.why else line


def heading(about: Mapping[str, Mapping[str, Any]]) -> str:
    """What's above the table: the machine and its ceilings."""
    ceilings = about["ceilings"]
    return (
        f"{', '.join(f'{name} {value}' for name, value in about['machine'].items())}\n"
        f"ceilings measured: copy {ceilings['copy'] / 1e9:.0f} GB/s, matmul {ceilings['matmul'] / 1e12:.1f} TFLOP/s\n\n{HEAD}"
    )
