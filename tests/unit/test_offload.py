"""The host tier behind the prefix cache: slots and their states, what moves when, and swapping."""

import pytest
import torch

from minivllm.config import ConfigError, EngineConfig, ModelConfig
from minivllm.kv.offload import HostTier
from minivllm.plan import EventKind
from minivllm.runner.kv_cache import KVCache
from minivllm.sched.scheduler import Scheduler
from tests.builders import events, finish, make_request, make_scheduler, step

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(capacity: int, *keys: bytes) -> HostTier:
    """A tier whose stores of `keys` have run, the first used longest ago."""
    tier = HostTier(capacity)
    for key in keys:
        for slot in tier.store([key]).values():
            slot.ready = True
    return tier


# slots


def test_content_is_found_only_after_its_store_has_run():
    tier = HostTier(2)
    (slot,) = tier.store([A]).values()
    assert tier.find(A) is None
    slot.ready = True
    assert tier.find(A) is slot


def test_content_that_is_there_is_not_stored_again():
    tier = filled(3, A)
    assert list(tier.store([A, B, B])) == [B]


def test_the_least_recently_used_gives_way():
    tier = filled(2, A, B)
    tier.touch([A])
    tier.store([C])
    assert tier.find(A)
    assert not tier.find(B)


def test_of_a_prefix_the_end_gives_way_first():
    tier = filled(3, A, B, C)
    tier.touch([A, B, C])
    tier.store([D])
    assert tier.find(A)
    assert tier.find(B)
    assert not tier.find(C)


def test_a_slot_with_a_pin_stays():
    tier = filled(1, A)
    tier.find(A).pins += 1
    assert tier.store([B]) is None


def test_a_slot_whose_store_has_not_run_stays():
    tier = HostTier(1)
    tier.store([A])
    assert tier.store([B]) is None


def test_what_does_not_fit_as_a_whole_changes_nothing():
    tier = filled(2, A, B)
    assert tier.store([C, D, b"e"]) is None
    assert list(tier.slots) == [A, B]


def test_a_store_never_evicts_what_it_was_asked_to_store():
    tier = filled(2, A, B)
    assert tier.store([A, C]) is not None
    assert tier.find(A)
    assert not tier.find(B)


# which settings go together


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host_kv_blocks": 4, "enable_prefix_caching": False}, "host_kv_blocks"),
        ({"host_kv_blocks": 4, "partial_block_hits": True}, "host_kv_blocks"),
        ({"host_kv_blocks": -1}, "host_kv_blocks"),
        ({"preemption": "swap"}, "preemption"),
        ({"preemption": "move"}, "preemption"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, field):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**settings)


def test_layer_groups_are_refused():
    with pytest.raises(ConfigError, match='hybrid="off"'):
        Scheduler(EngineConfig(host_kv_blocks=4), 65, 64, windows=(None, 8))


# a prompt that comes again when the device has forgotten it


def come_back(prompt=(1,) * 17, params=None, **config):
    """A prompt, others that take all its blocks, and the prompt again."""
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, **config)
    for name in ("first", "other", "third"):
        scheduler.add(make_request(name, prompt if name == "first" else 25))
        finish(scheduler)
    scheduler.add(make_request("again", prompt, **(params or {})))
    return scheduler, finish(scheduler)


def test_a_prompt_is_loaded_from_the_host_where_the_device_has_forgotten_it():
    scheduler, plans = come_back(host_kv_blocks=20)
    assert plans[0].num_tokens == 1
    assert [e.tokens for e in events(scheduler, EventKind.LOADED, "again")] == [16]
    assert scheduler.offload.stats.hits == 16
    assert not events(scheduler, EventKind.HIT)


def test_the_last_token_is_always_computed():
    scheduler, plans = come_back(host_kv_blocks=20, prompt=(1,) * 16)
    assert plans[0].num_tokens == 4
    assert [e.tokens for e in events(scheduler, EventKind.LOADED, "again")] == [12]


def test_who_wants_logprobs_of_the_prompt_computes_all_of_it():
    scheduler, plans = come_back(host_kv_blocks=20, params={"prompt_logprobs": 1})
    assert plans[0].num_tokens == 17
    assert not events(scheduler, EventKind.LOADED)


def test_without_host_blocks_it_is_computed_again():
    scheduler, plans = come_back()
    assert plans[0].num_tokens == 17
    assert not events(scheduler, EventKind.STORED)


def test_what_was_loaded_counts_as_cached_for_the_request():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, host_kv_blocks=20)
    again = make_request("again", [1] * 17)
    for request in (make_request("first", [1] * 17), make_request("other", 28), again):
        scheduler.add(request)
        finish(scheduler)
    assert again.num_cached_tokens == 16


def test_the_lookup_goes_on_in_the_host_behind_the_hits_on_the_device():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, host_kv_blocks=20)
    for request in (make_request("first", [1] * 25), make_request("other", 13), make_request("again", [1] * 25)):
        scheduler.add(request)
        finish(scheduler)
    (hit,), (loaded,) = (events(scheduler, kind, "again") for kind in (EventKind.HIT, EventKind.LOADED))
    assert hit.tokens + loaded.tokens == 24


def test_a_block_is_stored_in_the_step_after_the_one_that_fills_it():
    scheduler = make_scheduler(host_kv_blocks=20)
    scheduler.add(make_request("r", 8))
    first, second = step(scheduler), step(scheduler)
    assert first.stores == []
    assert [block for block, _ in second.stores] == first.rows[0].block_ids


def test_a_slot_is_pinned_while_a_load_from_it_is_on_its_way():
    scheduler, _ = come_back(host_kv_blocks=20)
    scheduler.add(make_request("fills", 28))
    finish(scheduler)
    scheduler.add(make_request("once more", [1] * 17))
    plan = scheduler.schedule()
    pinned = {slot.id for slot in scheduler.offload.tier.slots.values() if slot.pins}
    assert pinned == {slot for slot, _ in plan.loads} != set()


def test_forgetting_everything_empties_the_tier():
    scheduler, _ = come_back(host_kv_blocks=20)
    scheduler.offload.reset()
    scheduler.integrity()
    assert not scheduler.offload.tier.slots


# swapping


def crowd(**config):
    """Two requests that outgrow seven blocks of four tokens: the second is preempted in the middle of a block."""
    scheduler = make_scheduler(num_blocks=8, max_model_len=28, **config)
    scheduler.add(make_request("stays", 9, max_tokens=12))
    scheduler.add(make_request("leaves", 10, max_tokens=12))
    finish(scheduler)
    return scheduler


def test_a_swapped_request_computes_nothing_again():
    swapped, plain = crowd(host_kv_blocks=20, preemption="swap"), crowd()
    assert swapped.num_preemptions == plain.num_preemptions == 1
    assert swapped.in_flight.num_recomputed == 0
    assert plain.in_flight.num_recomputed == 13 - 8  # 13 had run when it left; two of its blocks were still cached


def test_a_swapped_request_gets_its_partly_full_block_back():
    scheduler = crowd(host_kv_blocks=20, preemption="swap")
    (loaded,) = events(scheduler, EventKind.LOADED)
    assert loaded.request == "leaves"
    assert loaded.tokens % 4


def test_the_trace_says_why_a_victim_is_computed_again():
    reasons = [crowd(host_kv_blocks=n, preemption="swap") for n in (20, 1)]
    told = [events(s, EventKind.PREEMPTED)[0].reason for s in reasons]
    assert told == ["swap", "recompute: the host tier is full"]


def test_a_request_of_several_answers_is_computed_again():
    scheduler = make_scheduler(num_blocks=10, max_model_len=28, host_kv_blocks=20, preemption="swap")
    scheduler.add(make_request("stays", 9, max_tokens=18))
    scheduler.add(make_request("leaves", 5, max_tokens=12, n=2))
    finish(scheduler)
    assert {e.reason.split(",")[0] for e in events(scheduler, EventKind.PREEMPTED)} == {"recompute: several sequences"}


def test_an_aborted_request_keeps_nothing_in_host_memory():
    scheduler = make_scheduler(num_blocks=8, max_model_len=28, host_kv_blocks=20, preemption="swap")
    for name in ("stays", "leaves"):
        scheduler.add(make_request(name, 9, max_tokens=12))
    while not scheduler.offload.swapped:
        step(scheduler)
    scheduler.abort("leaves")
    assert not any(slot.pins for slot in scheduler.offload.tier.slots.values())


# the memory


def test_blocks_come_back_from_host_memory_as_they_were():
    model = ModelConfig("llama", 8, 8, 8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4)
    cache = KVCache(model, 4, 2, torch.float32, host_blocks=3)
    for layer in cache.layers:
        layer.copy_(torch.rand_like(layer))
    before = [layer.clone() for layer in cache.layers]
    cache.store_blocks([(1, 2), (3, 0)])
    cache.load_blocks([(0, 1), (2, 3)])
    for old, new in zip(before, cache.layers, strict=True):
        assert torch.equal(new[:, 2:4], old[:, 6:8])
        assert torch.equal(new[:, 6:8], old[:, 2:4])
        assert torch.equal(new[:, 4:6], old[:, 4:6])
    assert cache.host[0].nbytes == 2 * model.kv_bytes_per_token(4)
