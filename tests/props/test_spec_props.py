"""Rejection sampling, enumerated: over all random numbers, a token's share is exactly what the target says."""

from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.sample import spec
from minivllm.sample.spec import accept_drafts

VOCAB, PARTS, GRID = 3, 4, 12
"""Probabilities are quarters, so that thresholds and interval ends are twelfths: twelve midpoints stand for all numbers."""
NUMBERS = [(i + 0.5) / GRID for i in range(GRID)]
DISTRIBUTIONS = [p for p in product(range(PARTS + 1), repeat=VOCAB) if sum(p) == PARTS]

Quarters = tuple[int, ...]


def array(quarters: Quarters) -> np.ndarray:
    return np.array(quarters) / PARTS


def shares_of_one(p: Quarters, q: Quarters) -> list[Fraction]:
    """How often each token comes first, over all drafts of one token, tests and draws."""
    shares = [Fraction()] * VOCAB
    for draft in np.flatnonzero(q):
        for test, draw in product(NUMBERS, repeat=2):
            token = accept_drafts([draft], [array(p), array(p)], [array(q)], [test], [draw, draw])[0]
            shares[token] += Fraction(q[draft], PARTS * GRID**2)
    return shares


def check_all_pairs() -> None:
    for p, q in product(DISTRIBUTIONS, DISTRIBUTIONS):
        assert shares_of_one(p, q) == [Fraction(weight, PARTS) for weight in p]


def test_a_token_has_the_targets_distribution_whatever_was_proposed():
    check_all_pairs()


some = st.sampled_from(DISTRIBUTIONS)
after = st.tuples(*[some] * VOCAB)


@settings(max_examples=15)
@given(some, some, after, after)
def test_two_tokens_have_the_targets_joint_distribution(p, q, p_after, q_after):
    shares: Counter[tuple[int, int]] = Counter()
    for one, two in product(np.flatnonzero(q).tolist(), range(VOCAB)):
        weight = Fraction(q[one] * q_after[one][two], PARTS**2 * GRID**3)
        if not weight:
            continue
        target = [array(p), array(p_after[one]), array(p)]
        for first, second, draw in product(NUMBERS, repeat=3):  # a row draws once, wherever it ends
            tokens = accept_drafts([one, two], target, [array(q), array(q_after[one])], [first, second], [draw] * 3)
            if len(tokens) > 1:
                shares[tokens[0], tokens[1]] += weight
            else:  # the next step draws the second
                for token, quarters in enumerate(p_after[tokens[0]]):
                    shares[tokens[0], token] += weight * Fraction(quarters, PARTS)
    for one, two in product(range(VOCAB), repeat=2):
        assert shares[one, two] == Fraction(p[one] * p_after[one][two], PARTS**2)


@given(some, some)
def test_a_draft_is_kept_as_often_as_the_two_distributions_overlap(p, q):
    kept = sum(
        Fraction(q[draft], PARTS * GRID)
        for draft in np.flatnonzero(q)
        for test in NUMBERS
        if len(accept_drafts([draft], [array(p), array(p)], [array(q)], [test], [0.5, 0.5])) > 1
    )
    assert kept == Fraction(sum(map(min, p, q)), PARTS)


def keep_every_draft(drafts, target, proposed, tests, draws):
    return [*drafts, spec.choose(target[-1], draws[-1])]


def draw_from_the_target(target, proposed):
    return target


def choose_without_a_total(weights, number):
    """The residual taken for probabilities although it doesn't add up to 1."""
    return min(int(np.searchsorted(np.cumsum(weights), number, side="right")), VOCAB - 1)


@pytest.mark.parametrize(
    ("function", "replacement"),
    [
        ("accept_drafts", keep_every_draft),
        ("residual", draw_from_the_target),
        ("choose", choose_without_a_total),
    ],
)
def test_a_seeded_fault_is_found(function, replacement, monkeypatch):
    monkeypatch.setattr(spec, function, replacement)
    monkeypatch.setitem(globals(), "accept_drafts", spec.accept_drafts)
    with pytest.raises(AssertionError):
        check_all_pairs()
