"""Long random runs from a seed: plain functions that raise `AssertionError`, for tests that must find a given fault."""

from random import Random

from minivllm.config import EngineConfig
from minivllm.kv.hybrid import request_blocks
from minivllm.kv.manager import KVCacheManager
from minivllm.plan import EventKind
from minivllm.request import BeamParams, Request, SamplingParams
from tests.checked_scheduler import CheckedScheduler
from tests.oracles import Census, ReferenceLRU
from tests.strategies import EOS

# who runs: the scheduler over physical slots


def walk_scheduler(
    seed: int, *, trust: bool = False, policy: str | None = None, async_depth: int = 0
) -> CheckedScheduler:
    """A dozen requests that share prefixes meet in a tight pool; every step is checked, then all must come to an end."""
    random = Random(seed)
    size, length = random.choice([1, 2, 4]), random.choice([12, 20])
    config = EngineConfig(
        block_size=size,
        max_num_batched_tokens=random.choice([3, 8, 30]),
        policy=policy or random.choice(["fcfs", "priority"]),
        publish_at=random.choice(["schedule", "schedule", "compute"]),
        partial_block_hits=random.random() < 0.5,
        async_depth=async_depth,
    )
    usable = -(-length // size) + random.randrange(4)
    checked = CheckedScheduler(config, usable + 1, length, (EOS,), trust=trust)
    return _meet(checked, random, length)


def _meet(checked: CheckedScheduler, random: Random, length: int) -> CheckedScheduler:
    for number in range(12):
        checked.add(_request(f"r{number}", random, length))
        for _ in range(random.randrange(4)):
            checked.step(lambda s: random.randint(0, 2) or random.randint(0, 2))
    checked.drain(lambda s: random.randint(1, 2))
    return checked


def _request(id: str, random: Random, length: int) -> Request:
    prompt = random.choice([[1] * 8, [1, 2] * 4, [2] * 8])[: random.randint(1, 8)] + random.choices([1, 2], k=2)
    params = SamplingParams(n=random.choice([1, 1, 2, 3]))
    beams = BeamParams(params.n) if random.random() < 0.5 else None
    room = length - len(prompt)
    return Request(id, prompt, params, max_tokens=random.randint(1, room), priority=random.randint(0, 2), beams=beams)


def walk_offload(seed: int, *, trust: bool = False, async_depth: int = 0) -> CheckedScheduler:
    """The same with host memory behind the pool, often too little, and victims that are swapped out."""
    random = Random(seed)
    size, length = random.choice([1, 2, 4]), random.choice([12, 20])
    config = EngineConfig(
        block_size=size,
        max_num_batched_tokens=random.choice([3, 8, 30]),
        policy=random.choice(["fcfs", "priority"]),
        publish_at=random.choice(["schedule", "compute"]),
        host_kv_blocks=random.choice([2, 6, 30]),
        preemption=random.choice(["swap", "swap", "recompute"]),
        async_depth=async_depth,
    )
    usable = -(-length // size) + random.randrange(4)
    checked = CheckedScheduler(config, usable + 1, length, (EOS,), trust=trust)
    return _meet(checked, random, length)


def walk_windows(seed: int, *, trust: bool = False) -> CheckedScheduler:
    """The same for layer groups with windows: some hits end where a window has no blocks any more."""
    random = Random(seed)
    size, length = random.choice([1, 2, 4]), random.choice([12, 20])
    config = EngineConfig(
        block_size=size,
        max_num_batched_tokens=random.choice([3, 8, 30]),
        policy=random.choice(["fcfs", "priority"]),
        publish_at=random.choice(["schedule", "schedule", "compute"]),
        free_order=random.choice(["leaf_first", "root_first"]),
    )
    windows = random.choice([(None, 3), (None, 5), (None, 1, 1), (4,), (6, 2), (None, None, 8)])
    usable = request_blocks(length, windows, config) + random.randrange(6)
    checked = CheckedScheduler(config, usable + 1, length, (EOS,), trust=trust, windows=windows)
    return _meet(checked, random, length)


# where KV lives: the manager against the reference LRU


def walk_cache(seed: int, steps: int = 120, *, free_order: str = "leaf_first") -> Census:
    """Prompts of few different blocks come and go; evictions must be those of the reference LRU, in its order."""
    random = Random(seed)
    lru = ReferenceLRU(range(1, 13), leaf_first=free_order == "leaf_first")
    evicted: list[int] = []

    def listen(kind: EventKind, blocks: tuple[int, ...] = (), **_: object) -> None:
        if kind is EventKind.EVICTED:
            evicted.extend(blocks)

    kv = KVCacheManager(EngineConfig(block_size=2, free_order=free_order), 13, listen)
    census, running = Census(kv, lru, evicted), []
    for number in range(steps):
        if running and random.random() < 0.5:
            census.end(running.pop(random.randrange(len(running))))
        else:
            prompt = [random.randint(0, 1) for _ in range(random.randint(1, 12))]
            sequence = Request(f"r{number}", prompt, SamplingParams(), max_tokens=1).sequences[0]
            sequence.uid = number
            if census.begin(sequence):
                running.append(sequence)
    return census
