"""Host memory and swapping in a whole engine: flags, answers, what `/stats` tells, and a step that fails."""

import io

import pytest
from rich.console import Console

from minivllm.cli.chat import Chat
from minivllm.config import EngineConfig
from minivllm.llm import LLM
from minivllm.request import SamplingParams
from tests.cli_support import write_tiny_model

PROMPTS = ["one question", "another question", "a third one", "and the last"]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def start(model, **changes) -> LLM:
    """Blocks for two of the four answers."""
    return LLM(
        model, EngineConfig(num_kv_blocks=12, dtype="float64", max_model_len=128, check_integrity=True, **changes)
    )


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_swapped_requests_give_the_same_answers_and_compute_nothing_again(model):
    plain, swapping = start(model), start(model, host_kv_blocks=40, preemption="swap")
    assert answers(plain) == answers(swapping)
    before, after = (llm.engine.core.scheduler for llm in (plain, swapping))
    assert before.num_preemptions > 0
    assert before.in_flight.num_recomputed > after.in_flight.num_recomputed == 0
    assert after.offload.stats.swaps == after.num_preemptions


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drafts_do_not_keep_blocks_from_the_host(model, preemption):
    """Blocks that accepted drafts have filled are stored, and no others: rejected tokens have no hash."""
    changes = {"host_kv_blocks": 60, "preemption": preemption}
    plain, drafting = start(model, **changes), start(model, spec_method="ngram", spec_ngram_min=1, **changes)
    assert answers(plain) == answers(drafting)
    before, after = (llm.engine.core.scheduler for llm in (plain, drafting))
    assert 0 < after.num_accepted.total() < after.num_drafts.total()
    kept = [{key for key in scheduler.offload.tier.slots if len(key) == 32} for scheduler in (before, after)]
    assert kept[0] == kept[1]


def test_stats_tell_what_was_found_and_moved(model):
    llm = start(model, host_kv_blocks=40, preemption="swap")
    answers(llm)
    console = Console(file=io.StringIO(), width=140, color_system=None)
    Chat(llm, SamplingParams(), console, "").show_stats()
    stats, size = llm.engine.core.scheduler.offload.stats, llm.engine.kv_memory.block_bytes
    assert f"{stats.stored * size:,} bytes out, {stats.loaded * size:,} back" in console.file.getvalue()


def test_after_a_step_that_failed_nothing_in_host_memory_is_trusted(model, monkeypatch):
    llm = start(model, host_kv_blocks=40, preemption="swap")
    answers(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.runner, "execute", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            answers(llm)
    tier = llm.engine.core.scheduler.offload.tier
    assert not tier.slots
    assert len(tier.free_ids) == 40
    assert answers(llm) == answers(start(model))
