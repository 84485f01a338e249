"""Decodes all so far and returns what is longer than what was sent: U+FFFD is sent first and stands for a character later."""

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
        new, self._sent = text[len(self._sent) :], text
        return new

    def finish(self) -> str:
        return ""
