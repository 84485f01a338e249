"""Frees a sequence's blocks in forward order: the first eviction takes the root and strands the rest (llm-d-inference-sim #704)."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.plan import EventKind
from minivllm.request import Sequence


class KVCacheManager:
    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        table = self.tables.pop(sequence.uid, None)
        if table is None:
            return
        self.pool.free(table.blocks)
        if table.blocks:
            blocks = tuple(block.id for block in table.blocks)
            self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=blocks)
