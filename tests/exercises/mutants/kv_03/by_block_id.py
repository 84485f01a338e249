"""Sorts by block id, largest first: the last block first only as long as ids were handed out in order."""

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
        blocks = sorted(table.blocks, key=lambda block: block.id, reverse=self.leaf_first)
        self.pool.free(blocks)
        if blocks:
            ids = tuple(block.id for block in blocks)
            self._emit(EventKind.FREED, request=sequence.request.id, sequence=sequence.index, blocks=ids)
