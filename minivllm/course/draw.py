"""Pictures of a run, from its trace: who holds which block, in what order the free ones go, who ran when.

Nothing here follows the engine's books itself. A trace is replayed through the scheduler, which knows them: so the drawing
can't disagree with the engine, and where the reader's own block pool is spliced in, the drawing is of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.course.film import NUM_HUES, Film, Frame, Label, Look
from minivllm.kv.block_pool import NULL_BLOCK, Block, BlockPool
from minivllm.obs.timeline import sequence_name
from minivllm.plan import EventKind, TraceEvent
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import TraceHeader, replay

if TYPE_CHECKING:
    from minivllm.llm import LLM

WIDTH, PER_ROW, NAME = 420.0, 12, 40.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cache's books at one moment. `tables` has each holder's block ids in token order, `gone` those given back just now."""

    caption: str
    num_blocks: int
    tables: Mapping[str, Seq[int]]
    free: Seq[int]
    published: frozenset[int]
    fresh: frozenset[int] = frozenset()
    hit: frozenset[int] = frozenset()
    gone: Mapping[str, Seq[int]] = field(default_factory=dict)


def pool_snapshot(pool: BlockPool, tables: Mapping[str, Seq[Block]] | None = None, caption: str = "") -> Snapshot:
    """A pool that is driven by hand, and the blocks that named holders got from it."""
    return Snapshot(
        caption=caption,
        num_blocks=len(pool.blocks),
        tables={name: [block.id for block in blocks] for name, blocks in (tables or {}).items()},
        free=[block.id for block in pool.free_list],
        published=frozenset(block.id for block in pool.blocks if block.hash is not None),
    )


def header_of(scheduler: Scheduler) -> TraceHeader:
    """What a replay of a scheduler's recorded events starts from."""
    eos = tuple(sorted(scheduler.eos_token_ids))
    return TraceHeader(scheduler.config, len(scheduler.kv.pool.blocks), scheduler.max_model_len, eos, scheduler.windows)


def snapshots(source: Scheduler | LLM) -> list[Snapshot]:
    """The cache after each step of everything that a scheduler, or the engine of an `LLM`, has run so far.

    Raises `TraceError` if its recorder no longer has the first events (it keeps the latest 10,000).
    """
    scheduler = scheduler_of(source)
    events = list(scheduler.recorder.events)
    return [_snapshot(state) for state in replay(header_of(scheduler), events) if state.recorder.step]


def scheduler_of(source: Scheduler | LLM) -> Scheduler:
    """The scheduler itself, or that of an `LLM`'s engine."""
    return source if isinstance(source, Scheduler) else source.engine.core.scheduler


def _snapshot(scheduler: Scheduler) -> Snapshot:
    """A replayed scheduler right after a step: its recorder holds that step's events only."""
    events = list(scheduler.recorder.events)
    sequences = [s for request in scheduler.requests.values() for s in request.live]
    tables = {
        sequence_name(s.request.id, s.index): scheduler.kv.block_ids(s)
        for s in sequences
        if s.uid in scheduler.kv.tables
    }
    now = pool_snapshot(scheduler.kv.pool)
    freed = (e for e in events if e.kind is EventKind.FREED)
    return Snapshot(
        caption=f"step {scheduler.recorder.step}: {describe(events)}",
        num_blocks=now.num_blocks,
        tables=tables,
        free=now.free,
        published=now.published,
        fresh=_blocks(events, EventKind.ALLOCATED),
        hit=_blocks(events, EventKind.HIT),
        gone={sequence_name(e.request, e.sequence): _in_token_order(scheduler, e.blocks) for e in freed},
    )


def _in_token_order(scheduler: Scheduler, blocks: Seq[int]) -> list[int]:
    """Freed blocks in token order again."""
    return list(blocks[::-1] if scheduler.kv.leaf_first else blocks)


def _blocks(events: Iterable[TraceEvent], kind: EventKind) -> frozenset[int]:
    return frozenset(block for event in events if event.kind is kind for block in event.blocks)


def describe(events: Iterable[TraceEvent]) -> str:
    """A step's events in words, the eviction of several blocks as one."""
    said: list[str] = []
    evicted: list[int] = []
    for event in events:
        if event.kind is EventKind.EVICTED:
            evicted += event.blocks
        elif words := _words(event):
            said.append(words)
    if evicted:
        said.append(f"evicted {_list(evicted)}")
    return "; ".join(said) or "nothing to do"


def _words(event: TraceEvent) -> str:
    who, blocks = sequence_name(event.request, event.sequence), _list(event.blocks)
    return {
        EventKind.SCHEDULED: f"{who} runs {event.tokens} token{'s' * (event.tokens != 1)} from {event.start}",
        EventKind.HIT: f"{who} hits {blocks} ({event.tokens} tokens)",
        EventKind.ALLOCATED: f"{who} gets {blocks}",
        EventKind.COPIED: f"{who} copies {' to '.join(map(str, event.blocks))}",
        EventKind.FORKED: f"{who} shares {blocks}",
        EventKind.PREEMPTED: f"{who} is preempted",
        EventKind.REFUSED: f"{who} waits for {event.reason}",
        EventKind.FINISHED: f"{who} ends ({event.reason})",
        EventKind.WITHDRAWN: f"{blocks} withdrawn",
    }.get(event.kind, "")


def _list(blocks: Seq[int]) -> str:
    """Block ids in words, runs of three and more as a range."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


# blocks, free list and tables as one film

LEGEND = (
    "A filled block has a holder, named below its number; an outlined one is in the free list, tinted if it can still be hit. "
    "Yellow dot: published. Thick border: allocated in this step; yellow border: hit. Dashed: given back in this step."
)


def draw_cache(source: Scheduler | LLM | Seq[Snapshot], steps: slice = slice(None), title: str = "KV cache") -> Film:
    """Blocks, free list and block tables after each step; `steps` selects some of them.

    `source` is a scheduler or an `LLM` (everything it has run), or snapshots of a pool driven by hand.
    """
    shots = list(snapshots(source) if not isinstance(source, Seq) else source)[steps]
    names = list(dict.fromkeys(name for shot in shots for name in [*shot.tables, *shot.gone]))
    film = Film(WIDTH, 0, title, legend=LEGEND)
    film.add_heading("physical blocks")
    pool = film.add_grid(max(shot.num_blocks for shot in shots), PER_ROW)
    film.add_heading("free list: the left end is taken next")
    queue = film.add_grid(max(len(shot.free) for shot in shots), PER_ROW, height=20)
    if names:
        film.add_heading("block tables, in token order")
    rows = {name: _table_row(film, name, _longest(shots, name)) for name in names}
    for shot in shots:
        looks = _block_looks(shot, names, pool) | _free_looks(shot, queue)
        for name, boxes in rows.items():
            looks |= _table_looks(shot, name, names, boxes)
        film.frames.append(Frame(shot.caption, looks))
    film.text = _text(shots[-1])
    return film


def _longest(shots: Seq[Snapshot], name: str) -> int:
    return max(len(shot.tables.get(name) or shot.gone.get(name, ())) for shot in shots)


def _table_row(film: Film, name: str, count: int) -> list[int]:
    film.labels.append(Label(NAME - 4, film.height + 14, name, "name"))
    return film.add_grid(max(count, 1), PER_ROW - 1, left=NAME, height=20)


def _hue(name: str, names: Seq[str]) -> str:
    return f"h{names.index(name) % NUM_HUES}"


def _block_looks(shot: Snapshot, names: Seq[str], boxes: Seq[int]) -> dict[int, Look]:
    return {boxes[i]: _block_look(shot, names, i) for i in range(shot.num_blocks)}


def _block_look(shot: Snapshot, names: Seq[str], block: int) -> Look:
    if block == NULL_BLOCK:
        return Look("null", str(block), "null", "block 0 stands for no block: it is never handed out")
    holders = [name for name, ids in shot.tables.items() if block in ids]
    marks = _marks(shot, block)
    if holders:
        note = holders[0] if len(holders) == 1 else f"{len(holders)} refs"
        title = f"block {block}: held by {', '.join(holders)}{', published' * ('pub' in marks)}"
        return Look(f"held {_hue(holders[0], names)}{marks}", str(block), note, title)
    if block in shot.published:
        return Look(f"cached{marks}", str(block), "", f"block {block}: free, and still findable by its hash")
    if block in shot.free:
        return Look("idle", str(block), "", f"block {block}: free")
    return Look("held", str(block), "?", f"block {block}: held")


def _marks(shot: Snapshot, block: int) -> str:
    pairs = ((" pub", shot.published), (" new", shot.fresh), (" hit", shot.hit))
    return "".join(mark for mark, blocks in pairs if block in blocks)


def _free_looks(shot: Snapshot, boxes: Seq[int]) -> dict[int, Look]:
    return {
        box: Look(
            "cached pub" if block in shot.published else "idle",
            str(block),
            "",
            f"block {block}, number {place} in the free list",
        )
        for place, (box, block) in enumerate(zip(boxes, shot.free, strict=False))
    }


def _table_looks(shot: Snapshot, name: str, names: Seq[str], boxes: Seq[int]) -> dict[int, Look]:
    held, gone = shot.tables.get(name, ()), shot.gone.get(name, ())
    looks = {}
    for i, (box, block) in enumerate(zip(boxes, held or gone, strict=False)):
        kind = "held" if held else "gone"
        marks = _marks(shot, block) if held else ""
        looks[box] = Look(
            f"{kind} {_hue(name, names)}{marks}", str(block), "", f"{name}: its block {i} is physical block {block}"
        )
    return looks


def _text(shot: Snapshot) -> str:
    rows = [f"  {name:>6}: {' '.join(map(str, ids))}" for name, ids in shot.tables.items()]
    return "\n".join([*rows, f"    free: {' '.join(map(str, shot.free))}"])
