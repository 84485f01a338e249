"""Host and device side by side: what planning steps ahead gains where the model doesn't run on the scheduler's processor.

Steps run on the device one after the other. The host plans a step, and takes in its tokens when it has run. With `depth` 0
it waits for them before it plans on, so a step takes what host and device need together; with 1 it plans the next step
meanwhile, and a step takes what the slower of the two needs. What a larger depth could add: nothing, while costs stay the
same. Left out: drawing tokens waits for the ones before to be taken in, where penalties and grammars are kept on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step costs, all in the same unit of time: the device to run it, the host to plan it and to take its tokens in."""

    device: float
    plan: float
    take_in: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on the clock. `where` is "plan", "device" or "take in"; host work is the first and the last."""

    where: str
    step: int
    start: float
    end: float


def simulate(costs: Iterable[StepCost], depth: int) -> list[Span]:
    """When each step is planned, run and taken in, if at most `depth` steps are planned ahead of the one that runs.

    Steps are numbered from 0; the clock starts at 0. Source of the order: `minivllm/engine/core.py:EngineCore.step`.
    """
    host = device = 0.0
    spans: list[Span] = []
    flying: list[tuple[int, float, float]] = []  # step, when it has run, what taking it in costs

    def take_in() -> None:
        nonlocal host
        step, ran, cost = flying.pop(0)
        spans.append(Span("take in", step, max(host, ran), max(host, ran) + cost))
        host = spans[-1].end

    for step, cost in enumerate(costs):
        spans.append(Span("plan", step, host, host + cost.plan))
        host = spans[-1].end
        spans.append(Span("device", step, max(host, device), max(host, device) + cost.device))
        device = spans[-1].end
        flying.append((step, device, cost.take_in))
        if len(flying) > depth:
            take_in()
    while flying:
        take_in()
    return spans


def steps_per_unit(device: float, host: float, depth: int) -> float:
    """Steps per unit of time in the long run, if each costs the same: 1 over the sum, or with a depth over the larger.

    Raises `ZeroDivisionError` for steps that cost nothing.
    """
    return 1 / (max(device, host) if depth else device + host)
