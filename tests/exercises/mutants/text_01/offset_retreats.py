"""Remembers how much of the window was sent, and forgets it when the window moves: text comes twice (sglang #31598)."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.course import solves


@solves("minivllm.sample.detok:IncrementalDetokenizer")
class IncrementalDetokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], skip_ids: frozenset[int] = frozenset()) -> None:
        self.token_bytes = token_bytes
        self.skip_ids = skip_ids
        self._bytes = b""
        self._sent = ""

    def push(self, token_id: int) -> str:
        if token_id in self.skip_ids:
            return ""
        self._bytes += self.token_bytes(token_id)
        text = self._bytes.decode(errors="replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            new, self._sent = text.rstrip("\N{REPLACEMENT CHARACTER}")[len(self._sent) :], ""
            return new
        new = text[len(self._sent) :]
        self._bytes, self._sent = b"", ""
        return new

    def finish(self) -> str:
        return self._bytes.decode(errors="replace")[len(self._sent) :]
