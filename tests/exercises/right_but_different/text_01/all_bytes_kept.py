"""Keeps all bytes, decodes them anew each time, and shows all but a U+FFFD that three more bytes could still change."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.course import solves


def decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


@solves("minivllm.sample.detok:IncrementalDetokenizer")
class IncrementalDetokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], skip_ids: frozenset[int] = frozenset()) -> None:
        self.token_bytes, self.skip_ids = token_bytes, skip_ids
        self.data, self.sent = bytearray(), 0

    def push(self, token_id: int) -> str:
        if token_id not in self.skip_ids:
            self.data += self.token_bytes(token_id)
        text = decode(bytes(self.data))
        certain = len(text) - self.open_end(text)
        new, self.sent = text[self.sent : certain], max(certain, self.sent)
        return new

    def open_end(self, text: str) -> int:
        """1 if the last character could still become another one: some continuation makes it one character."""
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            return 0
        for tail in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0", b"\xa0\x80", b"\x90\x80\x80"):
            more = decode(bytes(self.data) + tail)
            if len(more) == len(text) and not more.endswith("\N{REPLACEMENT CHARACTER}"):
                return 1
        return 0

    def finish(self) -> str:
        return decode(bytes(self.data))[self.sent :]
