"""Drops what can't be decoded: invalid bytes, and a real U+FFFD is all that is left of them in the whole text."""

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
        for keep in range(min(3, len(self._bytes)) + 1):
            try:
                text = self._bytes[: len(self._bytes) - keep].decode()
            except UnicodeDecodeError:
                continue
            self._bytes = self._bytes[len(self._bytes) - keep :]
            return text
        text, self._bytes = self._bytes.decode(errors="ignore"), b""
        return text

    def finish(self) -> str:
        return self._bytes.decode(errors="ignore")
