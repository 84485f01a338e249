"""The workloads, as token ids: deterministic, standard library only, no tokenizer involved.

Each repetition has other ids (a prefix cache can't answer from an earlier one) and the same lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WORKLOADS = ("W1", "W2", "W3", "W3-off", "W4", "W5", "W6")
CHAT_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
LOW_ID, HIGH_ID = 1000, 40_000
W4_PROMPT = 2048
W6_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
W6_MAX_NEW = 64


@dataclass(frozen=True, slots=True)
class Work:
    """One greedy request that ignores the end of sequence, so that exactly `new` tokens come out."""

    prompt: list[int]
    new: int


def _draw_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(LOW_ID, HIGH_ID) for _ in range(count)]


def single_stream(rep: int) -> list[Work]:
    """W1: one request of 128 prompt tokens, 256 new."""
    return [Work(_draw_ids(random.Random(f"w1-{rep}"), 128), 256)]


def ragged_batch(rep: int) -> list[Work]:
    """W2: 32 requests at once, 16 to 512 prompt tokens and 32 to 256 new; 10,851 and 4,226 in all."""
    lengths, ids = random.Random(0), random.Random(f"w2-{rep}")
    shapes = [(lengths.randint(16, 512), lengths.randint(32, 256)) for _ in range(32)]
    return [Work(_draw_ids(ids, prompt), new) for prompt, new in shapes]


def shared_prefix(rep: int, round: int) -> list[Work]:
    """W3: 16 requests that share 1,024 prompt tokens and have 32 of their own, 16 new each. Rounds of a repetition
    share the prefix too: the first meets a cold cache, the second a warm one."""
    prefix = _draw_ids(random.Random(f"w3-prefix-{rep}"), 1024)
    own = random.Random(f"w3-own-{rep}-{round}")
    return [Work(prefix + _draw_ids(own, 32), 16) for _ in range(16)]


def long_prefill(rep: int) -> list[Work]:
    """W4: one prompt of 2,048 tokens, 1 new."""
    return [Work(_draw_ids(random.Random(f"w4-{rep}"), W4_PROMPT), 1)]


def small_objects(rep: int) -> list[str]:
    """W6: 32 chat prompts, as text, that ask for a small JSON object."""
    rng = random.Random(f"w6-{rep}")
    jobs = ["baker", "pilot", "nurse", "farmer", "teacher", "sailor", "painter", "judge"]
    return [
        "<|im_start|>user\nWrite a JSON object with the fields name, age, city and hobbies "
        f"for a {rng.choice(jobs)} who is {rng.randint(20, 70)} years old.<|im_end|>\n<|im_start|>assistant\n"
        for _ in range(32)
    ]
