"""Decodes strictly and works through the errors by the positions that they report."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.course import solves


@solves("minivllm.sample.detok:IncrementalDetokenizer")
class IncrementalDetokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], skip_ids: frozenset[int] = frozenset()) -> None:
        self.lookup, self.ignored = token_bytes, skip_ids
        self.rest = b""

    def push(self, token_id: int) -> str:
        if token_id in self.ignored:
            return ""
        self.rest += self.lookup(token_id)
        out = []
        while self.rest:
            try:
                out.append(self.rest.decode())
                self.rest = b""
            except UnicodeDecodeError as error:
                out.append(self.rest[: error.start].decode())
                if error.reason == "unexpected end of data":
                    self.rest = self.rest[error.start :]
                    break
                out.append("\N{REPLACEMENT CHARACTER}")
                self.rest = self.rest[error.end :]
        return "".join(out)

    def finish(self) -> str:
        rest, self.rest = self.rest, b""
        return rest.decode(errors="replace")
