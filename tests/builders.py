"""Small requests and schedulers, and one step with tokens out of the hand: what scheduler tests start from."""

from zlib import crc32

from minivllm.config import EngineConfig
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import EventKind, StepPlan, TraceEvent
from minivllm.request import Request, SampledToken, SamplingParams
from minivllm.sched.scheduler import Scheduler
from minivllm.sched.trace import Recorder


def make_request(
    id: str,
    prompt: list[int] | int,
    max_tokens: int = 4,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    salt: str = "",
    **params: object,
) -> Request:
    """A request; a prompt given as a number is that many tokens which no other request has."""
    tokens = [crc32(f"{id}/{i}".encode()) for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        id,
        tokens,
        SamplingParams(**params),
        max_tokens=max_tokens,
        priority=priority,
        arrival_time=arrival_time,
        cache_salt=salt,
    )


def make_manager(num_blocks: int = 17, **config: object) -> KVCacheManager:
    """A manager over blocks of 4 tokens unless `config` says otherwise."""
    return KVCacheManager(EngineConfig(**{"block_size": 4, **config}), num_blocks)


def make_scheduler(
    num_blocks: int = 65, max_model_len: int = 64, eos: tuple[int, ...] = (), **config: object
) -> Scheduler:
    """A scheduler over blocks of 4 tokens that forgets no event."""
    settings = EngineConfig(**{"block_size": 4, **config})
    return Scheduler(settings, num_blocks, max_model_len, eos, Recorder(keep=None))


def draw(plan: StepPlan, token: int = 7) -> list[list[SampledToken]]:
    """The same token for everybody who samples."""
    return [[SampledToken(token) for _ in row.samples] for row in plan.rows if row.samples]


def step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    """One whole step: schedule, and update with the same token for everybody."""
    plan = scheduler.schedule()
    scheduler.update(plan, draw(plan, token))
    return plan


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens that each request runs in a step."""
    totals: dict[str, int] = {}
    for row in plan.rows:
        totals[row.sequence.request.id] = totals.get(row.sequence.request.id, 0) + row.num_tokens
    return totals


def finish(scheduler: Scheduler, token: int = 7, limit: int = 1000) -> list[StepPlan]:
    """Step until nobody is left."""
    plans = []
    while scheduler.has_requests:
        plans.append(step(scheduler, token))
        assert len(plans) <= limit, "the scheduler doesn't come to an end"
    return plans


def events(scheduler: Scheduler, kind: EventKind, request: str | None = None) -> list[TraceEvent]:
    return [e for e in scheduler.recorder.events if e.kind is kind and request in (None, e.request)]


def ids(requests) -> list[str]:
    return [r.id for r in requests]
