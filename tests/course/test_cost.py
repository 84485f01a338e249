"""Work is counted wherever it is done: in bytecode, in comparisons, in copies."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest

from minivllm.course.cost import counted, typical_work, work


@dataclass(slots=True, eq=False)
class Item:
    id: int


def grows(call) -> bool:
    """Whether a call on a structure of `n` items does more for more of them."""
    few, many = (typical_work([lambda n=n: call(STRUCTURES[n])] * 3) for n in (64, 4096))
    return many > 3 * few + 100


STRUCTURES = {n: [counted(Item)(i) for i in range(n)] for n in (64, 4096)}


@pytest.mark.parametrize(
    "call",
    [
        lambda items: [item for item in items if item.id < 0],
        lambda items: items.index(items[-1]),
        lambda items: Item(-1) in items,
        lambda items: sorted(items, key=id),
        lambda items: items[:],
        lambda items: list(items),
        lambda items: min(items, key=lambda item: item.id),
    ],
)
def test_looking_at_everything_costs_more_for_more(call):
    assert grows(call)


@pytest.mark.parametrize("call", [lambda items: items[-1], lambda items: len(items), lambda items: items[5].id + 1])
def test_looking_at_one_does_not(call):
    assert not grows(call)


def test_hashing_finds_an_item_without_comparing_all():
    items = OrderedDict.fromkeys(STRUCTURES[4096])
    assert work(lambda: items.move_to_end(STRUCTURES[4096][7])) < 1000


def test_counted_items_are_equal_only_to_themselves():
    one, two = counted(Item)(1), counted(Item)(1)
    assert one == one
    assert one != two
