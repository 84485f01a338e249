"""Decodes each token alone: U+FFFD for every part of a character."""

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
        return "" if token_id in self.skip_ids else self.token_bytes(token_id).decode(errors="replace")

    def finish(self) -> str:
        return ""
