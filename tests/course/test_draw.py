"""The drawings are of what the scheduler did: from its trace, by replay."""

import pytest

from minivllm.config import EngineConfig
from minivllm.course.draw import describe, draw_cache, pool_snapshot, snapshots
from minivllm.course.timeline import draw_timeline
from minivllm.kv.block_pool import BlockPool
from minivllm.plan import EventKind, TraceEvent
from minivllm.request import Request, SampledToken, SamplingParams
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder, TraceError


def run(prompts: dict[str, list[int]], num_blocks: int = 12, max_tokens: int = 4, keep: int = 10_000) -> Scheduler:
    """Run prompts through the scheduler alone; the "model" draws the number of tokens that it has seen."""
    config = EngineConfig(block_size=4, max_num_batched_tokens=16)
    scheduler = Scheduler(config, num_blocks, 20, recorder=Recorder(keep))
    for name, tokens in prompts.items():
        scheduler.add(Request(name, tokens, SamplingParams(ignore_eos=True), max_tokens=max_tokens))
    while scheduler.has_requests:
        plan = scheduler.schedule()
        rows = [row for row in plan.rows if row.samples]
        scheduler.update(plan, [[SampledToken(row.sequence.num_tokens) for _ in row.samples] for row in rows])
    return scheduler


def test_a_snapshot_has_the_engines_own_tables_free_order_and_published_blocks():
    scheduler = run({"A": list(range(9))})
    first, *_, last = snapshots(scheduler)
    assert first.tables == {"A": [1, 2, 3]}
    assert first.fresh == {1, 2, 3}
    assert first.published == {1, 2}
    assert list(last.free) == [block.id for block in scheduler.kv.pool.free_list]
    assert last.gone == {"A": [1, 2, 3]}


def test_captions_say_what_happened():
    shots = snapshots(run({"A": list(range(9)), "B": list(range(9))}))
    assert "B hits 1, 2 (8 tokens)" in shots[0].caption
    assert "A ends (length)" in shots[-1].caption


def test_every_block_is_drawn_in_every_frame():
    film = draw_cache(run({"A": list(range(9)), "B": [7] * 6}))
    assert len(film.frames) == 4
    for frame in film.frames:
        assert [frame.looks[i].label for i in range(12)] == [str(i) for i in range(12)]


def test_steps_can_be_selected():
    scheduler = run({"A": [1, 2, 3]})
    assert [f.caption.split(":")[0] for f in draw_cache(scheduler, slice(1, 3)).frames] == ["step 2", "step 3"]


def test_a_trace_that_lost_its_beginning_is_refused():
    with pytest.raises(TraceError):
        snapshots(run({"A": [1, 2, 3], "B": [4, 5]}, keep=5))


def test_a_pool_driven_by_hand_can_be_drawn():
    pool = BlockPool(6)
    held = pool.allocate(2)
    shot = pool_snapshot(pool, {"A": held}, "A takes two")
    assert (list(shot.free), shot.tables) == ([3, 4, 5], {"A": [1, 2]})
    assert "free: 3 4 5" in repr(draw_cache([shot]))


def test_runs_of_blocks_are_said_as_ranges():
    events = [TraceEvent(1, EventKind.EVICTED, blocks=(b,)) for b in (3, 4, 5, 9, 8)]
    assert describe(events) == "evicted 3-5, 9, 8"


def test_the_timeline_tells_prefill_from_decode_and_marks_hits():
    film = draw_timeline(run({"A": list(range(9)), "B": list(range(9))}))
    kinds = [look.kind for look in film.frames[0].looks.values()]
    assert kinds[0] == "held h0 prefill"
    assert kinds[1] == "held h0 decode"
    assert "held h1 prefill hit" in kinds


def test_the_timeline_shows_preemption_and_waiting():
    scheduler = run({"A": list(range(12)), "B": list(range(20, 32))}, num_blocks=8, max_tokens=8)
    assert scheduler.num_preemptions
    looks = list(draw_timeline(scheduler).frames[0].looks.values())
    assert "x" in [look.label for look in looks]
    assert "waits in steps" in " ".join(look.title for look in looks)


def test_a_timeline_can_start_late():
    film = draw_timeline(run({"A": list(range(9))}), since=3)
    assert film.frames[0].caption == "1 sequence, 2 steps"
