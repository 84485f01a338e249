"""The drawing of a trace shows what the scheduler decided."""

import io

import pytest
from rich.console import Console

from minivllm.cli.cache_view import BlockView, State, TableView, state_of, tables_of
from minivllm.cli.trace_view import bar, draw_block_tables, draw_pool, draw_timeline, steps_that_fit, tell_events
from minivllm.obs.timeline import Activity, build_timeline
from minivllm.plan import EventKind, TraceEvent
from tests.cli_support import TINY, run_requests


def drawn(renderable, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def scheduled(step: int, start: int, tokens: int, request: str = "a") -> TraceEvent:
    return TraceEvent(step, EventKind.SCHEDULED, request, start=start, tokens=tokens)


def added(step: int, num_tokens: int, request: str = "a") -> TraceEvent:
    return TraceEvent(step, EventKind.ADDED, request, token_ids=tuple(range(num_tokens)))


def activities(events: list[TraceEvent]) -> dict[int, Activity]:
    return {step: cell.activity for step, cell in build_timeline(events).lanes[0].cells.items()}


def test_prompt_tokens_are_prefill_and_later_ones_decode():
    events = [added(0, 5), scheduled(1, 0, 3), scheduled(2, 3, 2), scheduled(3, 5, 1)]
    assert activities(events) == {1: Activity.PREFILL, 2: Activity.PREFILL, 3: Activity.DECODE}


def test_a_prompt_of_which_one_token_is_left_is_still_prefill():
    assert activities([added(0, 5), scheduled(1, 4, 1)]) == {1: Activity.PREFILL}


def test_tokens_run_again_after_a_preemption_are_recomputed():
    preempted = TraceEvent(2, EventKind.PREEMPTED, "a")
    events = [added(0, 4), scheduled(1, 0, 4), preempted, scheduled(3, 0, 5), scheduled(4, 5, 1)]
    assert list(activities(events).values()) == [
        Activity.PREFILL, Activity.PREEMPTED, Activity.RECOMPUTE, Activity.DECODE,
    ]  # fmt: skip


def test_a_request_waits_from_the_step_after_it_came_until_it_runs():
    events = [added(1, 4), TraceEvent(2, EventKind.REFUSED, "a", reason="budget"), scheduled(3, 0, 4)]
    assert activities(events) == {2: Activity.WAITING, 3: Activity.PREFILL}


def test_a_trace_that_starts_late_tells_decode_by_its_single_token():
    assert activities([scheduled(7, 40, 1), scheduled(8, 41, 2)]) == {7: Activity.DECODE, 8: Activity.PREFILL}


def test_tokens_of_a_step_add_up_to_what_was_scheduled():
    run = run_requests(TINY, 16, [(0, list(range(20)), 1, 6), (1, list(range(9)), 2, 4)])
    timeline = build_timeline(run.events)
    for step in range(timeline.first, timeline.last + 1):
        expected = sum(e.tokens for e in run.events if e.step == step and e.kind is EventKind.SCHEDULED)
        assert timeline.tokens(step) == expected


def test_every_sequence_of_a_request_has_its_lane_and_its_end():
    run = run_requests(TINY, 16, [(0, list(range(9)), 3, 4)])
    lanes = build_timeline(run.events).lanes
    assert [(lane.request, lane.index, lane.finished, lane.num_drawn) for lane in lanes] == [
        ("r0", index, "length", 4) for index in range(3)
    ]


def test_cells_hold_token_counts_where_they_fit_and_bars_where_not():
    run = run_requests(TINY, 16, [(0, list(range(20)), 1, 6)])
    timeline = build_timeline(run.events)
    wide = drawn(draw_timeline(timeline, 1, timeline.last, 8, 100))
    assert "8  8  4  1  1  1  1  1■" in wide
    narrow = drawn(draw_timeline(timeline, 1, timeline.last, 8, 20), 20)
    assert "██▅••••■" in narrow


def test_preempted_waiting_and_recomputed_requests_can_be_seen():
    run = run_requests(TINY, 8, [(0, list(range(12)), 1, 10), (0, list(range(50, 61)), 1, 10)])
    assert any(e.kind is EventKind.PREEMPTED for e in run.events)
    timeline = build_timeline(run.events)
    text = drawn(draw_timeline(timeline, 1, timeline.last, 8, 200, run.states), 200)
    assert "✗" in text
    assert "KV used" in text
    assert Activity.RECOMPUTE in {cell.activity for lane in timeline.lanes for cell in lane.cells.values()}


def test_no_more_steps_are_drawn_than_fit():
    run = run_requests(TINY, 16, [(0, list(range(9)), 1, 20)])
    timeline = build_timeline(run.events)
    assert timeline.last > 15
    fit = steps_that_fit(timeline, 20)
    assert all(len(line) <= 20 for line in drawn(draw_timeline(timeline, 1, 99, 8, 20), 20).splitlines())
    assert fit == 12


def test_block_tables_name_every_block_and_the_slots_in_use():
    table = TableView("r3", 9, (BlockView(12, 2, True), BlockView(3, 1, True), BlockView(7, 1, False)))
    text = drawn(draw_block_tables([table], 4))
    assert "r3" in text
    assert "9 of 12 slots" in text
    assert "12 3 7" in text


def test_views_of_a_running_scheduler_agree_with_its_pool():
    run = run_requests(TINY, 16, [(0, list(range(9)), 2, 8)], steps=4)
    tables = tables_of(run.scheduler.running, run.scheduler.kv)
    assert [t.name for t in tables] == ["r0", "r0/1"]
    assert len({b.id for t in tables for b in t.blocks}) == state_of(run.scheduler).held
    assert state_of(run.scheduler).usable == run.scheduler.kv.pool.num_usable


@pytest.mark.parametrize(("share", "sign"), [(0, "▁"), (0.01, "▁"), (0.5, "▅"), (0.99, "█"), (1, "█")])
def test_bars_grow_with_their_share(share: float, sign: str):
    assert bar(share) == sign


def test_the_pool_bar_shows_all_three_kinds_of_blocks():
    line = draw_pool(State(held=10, cached=5, free=5, running=1, waiting=0), 20).plain
    assert line.startswith("██████████▒▒▒▒▒░░░░░")
    assert "10 held · 5 cached · 5 free" in line


def test_a_refusal_that_repeats_is_told_once_and_evictions_of_a_step_together():
    events = [
        TraceEvent(1, EventKind.REFUSED, "a", reason="blocks"),
        TraceEvent(2, EventKind.REFUSED, "a", reason="blocks"),
        TraceEvent(3, EventKind.EVICTED, blocks=(4,)),
        TraceEvent(3, EventKind.EVICTED, blocks=(5,)),
    ]
    told = tell_events(events)
    assert len(told) == 2
    assert told[1].endswith("blocks 4, 5")


def test_of_many_decisions_the_first_are_told_and_the_rest_counted():
    told = tell_events([TraceEvent(step, EventKind.PREEMPTED, "a") for step in range(20)], limit=5)
    assert len(told) == 6
    assert "15 more" in told[-1]


def test_a_preemption_tells_what_becomes_of_the_tokens():
    reasons = ("", "swap", "recompute: the host tier is full")
    told = tell_events([TraceEvent(1, EventKind.PREEMPTED, "a", reason=reason) for reason in reasons])
    assert [line.split(" and ")[1] for line in told] == [
        "will compute its tokens again",
        "keeps its KV in host memory",
        "will compute its tokens again (the host tier is full)",
    ]


def test_tokens_from_host_memory_are_told():
    (line,) = tell_events([TraceEvent(1, EventKind.LOADED, "a", blocks=(3,), tokens=4)])
    assert line.endswith("gets 4 tokens back from host memory (block 3)")
