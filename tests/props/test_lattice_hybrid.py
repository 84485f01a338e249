"""The lattice with windows: hybrid groups on and off say the same, and on, blocks did fall out of windows."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest

from minivllm.config import EngineConfig
from minivllm.kv.hybrid import Windows, form_groups
from minivllm.plan import EventKind, TraceEvent
from tests.integer_model import IntegerModel, plain_tokens
from tests.lattice import (
    Cell,
    make_scheduler,
    num_blocks,
    of,
    prove_batch,
    prove_cache,
    prove_chunks,
    prove_forks,
    refused,
    run,
    workload,
)

VOCAB, EOS = 50, 0
LAYERS: tuple[Windows, ...] = ((None, 1), (None, 4), (None, 7), (3, None), (6, 6), (2, 9))


@dataclass(frozen=True, slots=True)
class HybridCell(Cell):
    """A cell, the window of each of the model's two layers, and the switch."""

    windows: Windows
    hybrid: str

    def __str__(self) -> str:
        return f"{Cell.__str__(self)}-{'-'.join(map(str, self.windows))}-{self.hybrid}"

    @property
    def groups(self) -> Windows:
        return tuple(group.window for group in form_groups(self.windows, self.hybrid))

    @property
    def config(self) -> EngineConfig:
        return replace(Cell.config.fget(self), hybrid=self.hybrid)


def hybrid_cells() -> list[HybridCell]:
    """Every window under the switch, and of the rest what tells most: small blocks, and priorities where memory is short."""
    both = (True, False)
    rest = list(product((7, 64), both, both, both))
    return [
        HybridCell(length, size, *values, True, "priority" if values[2] else "fcfs", windows, hybrid)
        for (length, size), values, windows, hybrid in product(((12, 1), (48, 4)), rest, LAYERS, ("on", "off"))
    ]


CELLS = [cell for cell in hybrid_cells() if not refused(cell)]


@cache
def expected(max_model_len: int, windows: Windows) -> dict[tuple[str, int], list[int]]:
    """What the plain loop says to the workload."""
    requests = workload(max_model_len, VOCAB, EOS)
    return {(r.id, s.index): plain_tokens(r, s.index, VOCAB, EOS, windows) for r in requests for s in r.sequences}


def run_hybrid_cell(cell: HybridCell) -> list[TraceEvent]:
    """One cell: its tokens are those of the plain loop, and its trace proves what it stands for."""
    requests = workload(cell.max_model_len, VOCAB, EOS)
    scheduler = make_scheduler(cell, requests, EOS)
    model = IntegerModel(num_blocks(cell, requests), cell.block_size, VOCAB, cell.windows, cell.hybrid)
    said = run(cell, scheduler, requests, model.execute)
    assert said == expected(cell.max_model_len, cell.windows), "the configuration changed what is said"
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable, "blocks leaked"
    events = list(scheduler.recorder.events)
    prove_batch(cell, requests, events)
    prove_cache(cell, requests, events)
    prove_chunks(cell, requests, events)
    prove_forks(cell, requests, events)
    prove_windows(cell, events)
    return events


def prove_windows(cell: HybridCell, events: list[TraceEvent]) -> None:
    """Blocks fell out of a window exactly where a group has one that is shorter than the longest text by a block."""
    left_behind = [e for e in of(events, EventKind.FREED) if e.reason == "window"]
    sliding = [window for window in cell.groups if window and window + cell.block_size < cell.max_model_len]
    assert bool(left_behind) == bool(sliding), "null blocks"
    assert all(cell.groups[e.group] for e in left_behind), "a full group gave up a block"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_hybrid_groups_change_memory_and_nothing_that_is_said(cell):
    run_hybrid_cell(cell)
