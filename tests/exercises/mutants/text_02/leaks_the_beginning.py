"""Finds stop strings across pieces but shows everything at once: their first characters have been seen by then."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.sample.stop:StopChecker")
class StopChecker:
    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self.stop, self.include, self.matched, self.held = stop, include, None, ""
        self._text = ""

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        if self.matched is not None:
            return "", self.matched
        old = len(self._text)
        self._text += text
        for end in range(old + 1, len(self._text) + 1) if active else ():
            for stop in self.stop:
                if self._text[:end].endswith(stop):
                    self.matched = stop
                    return self._text[old : end if self.include else max(end - len(stop), old)], stop
        return text, None
