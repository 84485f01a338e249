"""Reports every table that is freed, also one without blocks: an event that says nothing."""

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
        blocks = table.blocks[::-1] if self.leaf_first else table.blocks
        self.pool.free(blocks)
        ids = tuple(block.id for block in blocks)
        self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=ids)
