"""Keeps the whole text and finds the first end of a match by trying every position from where the piece begins."""

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
        start = len(self._text)
        self._text += text
        if active:
            for end in range(start + 1, len(self._text) + 1):
                for stop in self.stop:
                    if self._text.endswith(stop, 0, end):
                        self.matched = stop
                        shown = self._upto(end if self.include else end - len(stop))
                        self._shown = len(self._text)
                        return shown, stop
        return self._upto(len(self._text) if final or self.include else self._safe()), None

    def _upto(self, end: int) -> str:
        text, self._shown = self._text[self._shown : end], end
        return text

    def _safe(self) -> int:
        for start in range(self._shown, len(self._text)):
            rest = self._text[start:]
            if any(stop.startswith(rest) and stop != rest for stop in self.stop):
                return start
        return len(self._text)
