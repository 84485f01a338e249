"""Chapter 6: the numbers and invariants of its rows, A18 (prefix cache) and A35 (which block goes first)."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lessons.naive import naive_stranded
from minivllm.calc.hw import GIB
from minivllm.calc.memory import best_prefix_hit, block_bytes, stranded_blocks
from minivllm.calc.models import LLAMA_3_8B
from minivllm.course.drive import ask, make_scheduler, run, step
from minivllm.kv.prefix import extend_hashes
from minivllm.request import Request
from minivllm.sched.scheduler import Scheduler

TABLE = [(15, 0, 0, 15), (16, 1, 0, 16), (17, 1, 16, 1), (32, 2, 16, 16), (33, 2, 32, 1), (1000, 62, 992, 8)]


def chain(tokens: list[int], salt: str = "", block_size: int = 16) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, salt)
    return hashes


def same(left: list[bytes], right: list[bytes]) -> int:
    """How many leading hashes agree."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def served(scheduler: Scheduler, name: str, tokens: list[int], salt: str = "") -> Request:
    request = ask(scheduler, name, tokens, salt=salt)
    run(scheduler)
    return request


# A18


@pytest.mark.parametrize(("prompt", "full", "hit", "computed"), TABLE)
def test_row_A18_what_a_prompt_that_was_served_before_hits_and_computes(prompt, full, hit, computed):
    split = best_prefix_hit(prompt)
    assert (split.full_blocks, split.hit_tokens, split.computed_tokens) == (full, hit, computed)
    scheduler = make_scheduler(num_blocks=160)
    served(scheduler, "first", list(range(prompt)))
    assert len(chain(list(range(prompt)))) == full
    assert served(scheduler, "again", list(range(prompt))).num_cached_tokens == hit


def test_row_A18_another_first_token_misses_everything():
    tokens = list(range(100))
    assert same(chain(tokens), chain([7_777, *tokens[1:]])) == 0


@given(st.integers(0, 5), st.integers(0, 3))
def test_row_A18_another_last_token_of_block_k_keeps_exactly_the_blocks_before_it(k, spare):
    tokens = list(range(16 * 6 + spare))
    changed = tokens.copy()
    changed[16 * k + 15] = -1
    assert same(chain(tokens), chain(changed)) == k


def test_row_A18_two_salts_never_share():
    scheduler = make_scheduler(num_blocks=40)
    served(scheduler, "a", list(range(64)), salt="tenant a")
    assert served(scheduler, "b", list(range(64)), salt="tenant b").num_cached_tokens == 0
    assert served(scheduler, "a again", list(range(64)), salt="tenant a").num_cached_tokens == 48


def test_row_A18_answers_are_the_same_with_and_without_a_cache():
    prompts = [[1] * 40, [1] * 33 + [2], [1] * 40, [3] * 20]
    answers = []
    for caching in (True, False):
        scheduler = make_scheduler(num_blocks=20, enable_prefix_caching=caching)
        requests = [ask(scheduler, f"r{i}", prompt, max_tokens=5) for i, prompt in enumerate(prompts)]
        run(scheduler)
        answers.append([request.sequences[0].output_token_ids for request in requests])
    assert answers[0] == answers[1]


class Cache(RuleBasedStateMachine):
    """Requests over two tokens, so that prefixes meet often, in a pool that is always short. The model of it: every published
    block stands for a text, salt and tokens from the prompt's beginning on, and the same hash always for the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(num_blocks=9, block_size=2, max_model_len=14)
        self.requests: list[Request] = []
        self.texts: dict[bytes, tuple[str, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        new=st.integers(1, 4),
        salt=st.sampled_from(["", "x"]),
    )
    def arrive(self, tokens: list[int], new: int, salt: str) -> None:
        name = f"r{len(self.requests)}"
        self.requests.append(ask(self.scheduler, name, tokens, max_tokens=new, salt=salt))

    @precondition(lambda self: self.scheduler.has_requests)
    @rule()
    def advance(self) -> None:
        step(self.scheduler)

    @invariant()
    def a_hash_means_one_text(self) -> None:
        for request in self.scheduler.requests.values():
            (sequence,) = request.sequences
            table = self.scheduler.kv.tables.get(sequence.uid)
            for i, block in enumerate(table.blocks if table else []):
                if block.hash is not None:
                    text = (request.cache_salt, tuple(sequence.tokens(0, 2 * i + 2)))
                    assert self.texts.setdefault(block.hash, text) == text

    @invariant()
    def somebody_computes_the_last_token(self) -> None:
        assert all(r.num_cached_tokens < len(r.prompt_token_ids) for r in self.requests)

    @invariant()
    def the_books_balance_and_nothing_is_stranded(self) -> None:
        self.scheduler.integrity()
        chains = [request.sequences[0].block_hashes for request in self.requests]
        assert naive_stranded(self.scheduler.kv.pool, chains) == 0


TestRowA18CacheMachine = Cache.TestCase
TestRowA18CacheMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# A35


def test_row_A35_a_prefix_of_100_000_tokens_strands_12_gib_when_its_root_goes():
    dead = stranded_blocks(100_000 // 16, evicted=0)
    assert dead == 6_249
    assert dead * block_bytes(LLAMA_3_8B) / GIB == pytest.approx(12.205, abs=0.001)
    assert stranded_blocks(32_768 // 16, 0) * block_bytes(LLAMA_3_8B) / GIB == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize(("order", "dead"), [("root_first", 8), ("leaf_first", 0)])
def test_row_A35_freeing_root_first_strands_all_others_at_the_first_eviction(order, dead):
    """Nine full blocks and a partial one fill the pool: the partial one is taken first, then one of the nine."""
    scheduler = make_scheduler(num_blocks=11, free_order=order)
    talk = served(scheduler, "talk", list(range(159)))
    chains = [list(talk.sequences[0].block_hashes)]
    scheduler.kv.pool.allocate(2)
    assert naive_stranded(scheduler.kv.pool, chains) == dead


def churn(order: str, requests: int, seed: int) -> int:
    """The most blocks that were ever stranded while requests with few, long beginnings came and went."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=25, block_size=4, free_order=order)
    chains, worst = [], 0
    for number in range(requests):
        beginning = rng.randrange(5)
        tokens = [beginning] * rng.randrange(1, 40) + [rng.randrange(3) for _ in range(rng.randrange(8))]
        chains.append(list(served(scheduler, f"r{number}", tokens).sequences[0].block_hashes))
        worst = max(worst, naive_stranded(scheduler.kv.pool, chains[-200:]))
    return worst


@pytest.mark.slow
def test_row_A35_leaf_first_strands_nothing_in_ten_thousand_operations():
    """A request is at least three operations: allocate, publish, free."""
    scheduler = make_scheduler(num_blocks=25, block_size=4)
    rng, chains = random.Random(0), []
    for number in range(3_400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        chains.append(list(served(scheduler, f"r{number}", tokens).sequences[0].block_hashes))
        if number % 10 == 0:
            assert naive_stranded(scheduler.kv.pool, chains) == 0


@given(st.integers(0, 1000))
@settings(max_examples=10)
def test_row_A35_leaf_first_never_strands_root_first_does(seed):
    assert churn("leaf_first", 60, seed) == 0
    assert churn("root_first", 60, seed) > 0


@given(st.integers(0, 20))
def test_row_A35_evicting_k_leaves_costs_at_most_k_blocks_of_a_hit(k):
    scheduler = make_scheduler(num_blocks=22, block_size=4)
    talk = list(range(80))
    served(scheduler, "talk", talk)
    taken = scheduler.kv.pool.allocate(k)
    hits = scheduler.kv.lookup(ask(scheduler, "again", [*talk, 1]).sequences[0], 81)
    assert len(hits) >= 20 - k
    scheduler.kv.pool.free(taken)
