"""A picture of streamed text: which bytes each token brought, which characters are shown, and which wait and why."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from minivllm.course.film import CELL, GAP, NUM_HUES, Film, Frame, Look
from minivllm.sample.detok import IncrementalDetokenizer
from minivllm.sample.stop import StopChecker

PER_ROW, HEIGHT = 14, 24.0
LEGEND = (
    "One colour a token. Bytes with a dashed border are those of an unfinished character; tinted characters are held "
    "back because a stop string may begin there; dashed characters are the stop string, never shown."
)


@dataclass(frozen=True, slots=True)
class StreamStep:
    """After one token: bytes seen, how many of them are undecoded, the text shown so far, the text held back."""

    num_bytes: int
    undecoded: int
    shown: str
    held: str
    matched: str | None


def follow_stream(tokens: Seq[bytes], stop: Seq[str] = ()) -> list[StreamStep]:
    """Run tokens, given as bytes, through the engine's detokenizer and stop checker; ends at a match."""
    detokenizer, checker = IncrementalDetokenizer(tokens.__getitem__), StopChecker(tuple(stop))
    steps: list[StreamStep] = []
    shown = decoded = ""
    for i in range(len(tokens)):
        last = i == len(tokens) - 1
        text = detokenizer.push(i) + (detokenizer.finish() if last else "")
        decoded += text
        delta, matched = checker.feed(text, final=last)
        shown += delta
        so_far = b"".join(tokens[: i + 1])
        undecoded = 0 if last else len(so_far) - len(decoded.encode())
        steps.append(StreamStep(len(so_far), undecoded, shown, checker.held, matched))
        if matched is not None:
            break
    return steps


def draw_stream(tokens: Seq[bytes], stop: Seq[str] = (), title: str = "text as it comes") -> Film:
    """A film with one frame a token. `tokens` are valid UTF-8 together, each the bytes that a token stands for."""
    steps = follow_stream(tokens, stop)
    data = b"".join(tokens)
    text = data.decode()
    film = Film(PER_ROW * (CELL + GAP) + 4, 0, title, legend=LEGEND)
    film.add_heading("bytes")
    byte_boxes = film.add_grid(len(data), PER_ROW, height=HEIGHT)
    film.height += 4
    film.add_heading("text")
    character_boxes = film.add_grid(len(text), PER_ROW, height=HEIGHT)
    film.height += 4
    owners = [i for i, token in enumerate(tokens) for _ in token]
    for number, step in enumerate(steps):
        looks = _byte_looks(data, owners, step, number, byte_boxes) | _text_looks(text, step, character_boxes)
        film.frames.append(Frame(_caption(tokens[number], number, step), looks))
    film.text = f"shown: {steps[-1].shown!r}"
    return film


def _byte_looks(data: bytes, owners: Seq[int], step: StreamStep, number: int, boxes: Seq[int]) -> dict[int, Look]:
    looks = {}
    for i in range(step.num_bytes):
        waiting = i >= step.num_bytes - step.undecoded
        kind = "gone" if waiting else "held"
        new = " new" if owners[i] == number else ""
        title = f"byte {i} of token {owners[i]}{', of an unfinished character' * waiting}"
        looks[boxes[i]] = Look(f"{kind} h{owners[i] % NUM_HUES}{new}", f"{data[i]:02X}", "", title)
    return looks


def _text_looks(text: str, step: StreamStep, boxes: Seq[int]) -> dict[int, Look]:
    """Shown characters are plain, held ones tinted; of a match what follows the text shown is dashed."""
    looks = {}
    end = len(step.shown) + len(step.held) + len(step.matched or "")
    for i in range(end):
        if i < len(step.shown):
            kind, words = "idle", "shown"
        elif step.matched is not None:
            kind, words = "gone", "part of the stop string: never shown"
        else:
            kind, words = "cached", "held back: a stop string may begin here"
        looks[boxes[i]] = Look(kind, _visible(text[i]), "", f"{text[i]!r}: {words}")
    return looks


def _visible(character: str) -> str:
    return {"\n": "⏎", " ": "␣"}.get(character, character)


def _caption(token: bytes, number: int, step: StreamStep) -> str:
    said = f"token {number} brings {token.hex(' ').upper()}"
    if step.matched is not None:
        return f"{said}: the stop string {step.matched!r} is complete; shown {step.shown!r}"
    waits = [
        f"{step.undecoded} byte{'s' * (step.undecoded > 1)} wait{'s' * (step.undecoded == 1)}" * bool(step.undecoded),
        f"{step.held!r} is held back" * bool(step.held),
    ]
    return "; ".join([f"{said}: shown {step.shown!r}", *filter(None, waits)])
