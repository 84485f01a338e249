"""Holds back one token, not one unfinished character: too much where a token is text, too little where a character is four."""

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
        text, self._bytes = self._bytes.decode(errors="replace"), self.token_bytes(token_id)
        return text

    def finish(self) -> str:
        return self._bytes.decode(errors="replace")
