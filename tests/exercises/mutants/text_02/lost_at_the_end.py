"""Ignores final: what may have become a stop string is never shown when the text ends."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.sample.stop:StopChecker")
class StopChecker:
    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self.stop, self.include, self.matched = stop, include, None
        self._text, self._shown = "", 0

    @property
    def held(self) -> str:
        return self._text[self._shown :]

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        if self.matched is not None:
            return "", self.matched
        old, self._text = len(self._text), self._text + text
        match = self.match(old) if active else None
        if match is not None:
            start, self.matched = match
            return self.show(start + len(self.matched) if self.include else start), self.matched
        return self.show(len(self._text) - (0 if self.include else self.growing())), None

    def show(self, end: int) -> str:
        new, self._shown = self._text[self._shown : end], max(end, self._shown)
        return new

    def match(self, old: int) -> tuple[int, str] | None:
        for end in range(old + 1, len(self._text) + 1):
            for stop in self.stop:
                if self._text[:end].endswith(stop):
                    return end - len(stop), stop
        return None

    def growing(self) -> int:
        for n in range(len(self._text), 0, -1):
            if any(len(stop) > n and stop.startswith(self._text[-n:]) for stop in self.stop):
                return n
        return 0
