"""The workloads are the ones that other engines are measured with: same shapes, same ids."""

import hashlib

import pytest

from minivllm.bench import workloads


def fingerprint(works: list[workloads.Work]) -> str:
    return hashlib.sha256(repr([(w.prompt, w.new) for w in works]).encode()).hexdigest()[:12]


def test_a_single_stream_is_128_tokens_in_and_256_out():
    (work,) = workloads.single_stream(1)
    assert (len(work.prompt), work.new) == (128, 256)


def test_the_ragged_batch_has_the_published_totals():
    works = workloads.ragged_batch(1)
    assert len(works) == 32
    assert (sum(len(w.prompt) for w in works), sum(w.new for w in works)) == (10_851, 4_226)
    assert all(16 <= len(w.prompt) <= 512 and 32 <= w.new <= 256 for w in works)


def test_repetitions_of_the_ragged_batch_have_other_ids_and_the_same_lengths():
    first, second = workloads.ragged_batch(1), workloads.ragged_batch(2)
    assert [len(w.prompt) for w in first] == [len(w.prompt) for w in second]
    assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))


def test_rounds_share_the_prefix_and_nothing_else():
    cold, warm = workloads.shared_prefix(3, 0), workloads.shared_prefix(3, 1)
    assert len({tuple(w.prompt[:1024]) for w in cold + warm}) == 1
    assert len({tuple(w.prompt[1024:]) for w in cold + warm}) == 32
    assert workloads.shared_prefix(4, 0)[0].prompt[:1024] != cold[0].prompt[:1024]


def test_the_long_prefill_draws_one_token():
    (work,) = workloads.long_prefill(1)
    assert (len(work.prompt), work.new) == (2048, 1)


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        (workloads.single_stream(2), "c83d56fe0b97"),
        (workloads.ragged_batch(2), "ae5c73400014"),
        (workloads.shared_prefix(2, 0), "b6570a3a57fc"),
        (workloads.shared_prefix(2, 1), "3e6c68483c18"),
        (workloads.long_prefill(2), "602d5f31f0fa"),
    ],
)
def test_ids_are_those_of_the_peers(works: list[workloads.Work], expected: str):
    assert fingerprint(works) == expected


def test_small_objects_are_those_of_the_peers_with_the_schema_of_the_peers():
    assert hashlib.sha256(repr(workloads.small_objects(2)).encode()).hexdigest()[:12] == "e2b003b8a81f"
    assert hashlib.sha256(repr((workloads.W6_SCHEMA, workloads.W6_MAX_NEW)).encode()).hexdigest()[:12] == "581ffa291e04"
