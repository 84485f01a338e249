"""One counter for each stop string and start: all beginnings that are alive, advanced character by character."""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.sample.stop:StopChecker")
class StopChecker:
    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self.stop, self.include = stop, include
        self.matched: str | None = None
        self.alive: list[tuple[int, int]] = []  # (which stop string, how many of its characters have come)
        self.buffer = ""

    @property
    def held(self) -> str:
        return self.buffer

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        if self.matched is not None:
            return "", self.matched
        shown = ""
        for character in text:
            self.buffer += character
            self.alive = [
                (i, n + 1)
                for i, n in [*self.alive, *((i, 0) for i in range(len(self.stop)))]
                if self.stop[i][n] == character
            ]
            complete = min((i for i, n in self.alive if n == len(self.stop[i])), default=None)
            self.alive = [(i, n) for i, n in self.alive if n < len(self.stop[i])]
            if complete is not None and active:
                self.matched = self.stop[complete]
                kept = self.buffer if self.include else self.buffer[: len(self.buffer) - len(self.matched)]
                self.buffer = ""
                return shown + kept, self.matched
            shown += self.release()
        if final:
            shown, self.buffer = shown + self.buffer, ""
        return shown, None

    def release(self) -> str:
        keep = 0 if self.include else max((n for _, n in self.alive), default=0)
        if keep == 0:
            text, self.buffer = self.buffer, ""
        else:
            text, self.buffer = self.buffer[:-keep], self.buffer[-keep:]
        return text
