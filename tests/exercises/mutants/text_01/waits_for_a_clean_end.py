"""Waits until all that waits is valid: with invalid bytes for ever it says nothing and decodes more and more (sglang #34852)."""

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
            return ""
        self._bytes = b""
        return text

    def finish(self) -> str:
        return self._bytes.decode(errors="replace")
