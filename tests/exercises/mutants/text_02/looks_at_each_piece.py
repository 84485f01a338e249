"""Looks for stop strings in each piece alone: one that is cut into three tokens is never found (vLLM #2577, fixed in #3672)."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.sample.stop:StopChecker")
class StopChecker:
    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self.stop, self.include, self.matched, self.held = stop, include, None, ""

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        if self.matched is not None:
            return "", self.matched
        found = [(text.find(stop) + len(stop), stop) for stop in self.stop if active and stop in text]
        if not found:
            return text, None
        end, self.matched = min(found, key=lambda pair: pair[0])
        return text[: end if self.include else end - len(self.matched)], self.matched
