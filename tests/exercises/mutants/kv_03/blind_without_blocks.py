"""Takes a table without blocks for no table, and leaves it there: the manager remembers every request that got nothing."""

from __future__ import annotations

from minivllm.course import solves
from minivllm.plan import EventKind
from minivllm.request import Sequence


class KVCacheManager:
    @solves("minivllm.kv.manager:KVCacheManager.free")
    def free(self, sequence: Sequence) -> None:
        table = self.tables.get(sequence.uid)
        if table is None or not table.blocks:
            return
        del self.tables[sequence.uid]
        blocks = table.blocks[::-1] if self.leaf_first else table.blocks
        self.pool.free(blocks)
        ids = tuple(block.id for block in blocks)
        self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=ids)
