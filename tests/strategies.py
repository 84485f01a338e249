"""Hypothesis strategies that the property tests share: small alphabets, so that prefixes collide often."""

from hypothesis import strategies as st

from minivllm.config import EngineConfig
from minivllm.request import BeamParams, Request, SamplingParams

EOS = 0

tokens = st.sampled_from([1, 2, 1, 2, 1, 2, EOS])
"""What may be drawn."""

prompt_tokens = st.integers(1, 2)


@st.composite
def engines(draw: st.DrawFn) -> tuple[EngineConfig, int, int]:
    """(config, number of blocks, max_model_len): any switches, and a pool of one to two longest requests."""
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(2, 16))
    chunked = draw(st.booleans())
    budget = draw(st.integers(1, 16)) if chunked else max_model_len + draw(st.integers(0, 8))
    longest = -(-max_model_len // block_size)
    caching = draw(st.sampled_from([True, True, False]))
    partial = caching and draw(st.booleans())
    host = draw(st.sampled_from([0, 1, 3, 9])) if caching and not partial else 0
    config = EngineConfig(
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.sampled_from([8, 8, 3, 1])),
        enable_prefix_caching=caching,
        partial_block_hits=partial,
        host_kv_blocks=host,
        preemption=draw(st.sampled_from(["recompute", "swap"])) if host else "recompute",
        enable_chunked_prefill=chunked,
        long_prefill_threshold=draw(st.sampled_from([0, 0, 1, 3])) if chunked else 0,
        reserve_full_prompt=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.3])),
        policy=draw(st.sampled_from(["fcfs", "priority", "static"])),
        free_order=draw(st.sampled_from(["leaf_first", "root_first"])),
        lifo_unhashed=draw(st.booleans()),
        publish_at=draw(st.sampled_from(["schedule", "compute"])),
        async_depth=draw(st.integers(0, 1)),
    )
    return config, 1 + longest + draw(st.integers(0, longest + 2)), max_model_len


@st.composite
def requests(draw: st.DrawFn, id: str, max_model_len: int) -> Request:
    """A request that may well be refused: too long, or with too many answers. Of several answers, some are beams."""
    prompt = draw(st.lists(prompt_tokens, max_size=max_model_len))
    room = max(max_model_len - len(prompt), 1)
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 2, 3])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (2,)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    beams = BeamParams(params.n) if draw(st.integers(0, 3)) == 0 else None
    return Request(
        id,
        prompt,
        params,
        max_tokens=draw(st.sampled_from([room, room, 1]) | st.integers(1, room)),
        priority=draw(st.integers(0, 2)),
        arrival_time=draw(st.sampled_from([0.0, 1.0, 2.0])),
        cache_salt=draw(st.sampled_from(["", "", "tenant"])),
        beams=beams,
    )
