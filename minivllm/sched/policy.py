"""Who waits in which order, and who is preempted first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from minivllm.config import Policy
from minivllm.request import Request


class FcfsQueue(deque[Request]):
    """First come, first served; preempted requests return to the front, so admission order stays arrival order."""

    push, push_back = deque.append, deque.appendleft

    def peek(self) -> Request:
        return self[0]

    def pop(self) -> Request:  # type: ignore[override]
        return self.popleft()


Rank = tuple[int, float, int]


def rank(request: Request) -> Rank:
    """Order under the priority policy: the smaller, the more important; ties go to the earlier arrival."""
    return request.priority, request.arrival_time, request.sequences[0].uid


class PriorityQueue:
    """The most important request first, new or preempted. A newcomer never preempts: it only waits at the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (rank(request), request))

    push_back = push

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((rank(request), request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))


def make_queue(policy: Policy) -> FcfsQueue | PriorityQueue:
    """Requests that hold no blocks: `push` takes a new one, `push_back` one that was preempted or set aside."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()


def pick_victim(running: list[Request], policy: Policy) -> Request:
    """Whom to preempt when blocks run out: the last admitted, or under priority the least important."""
    return max(running, key=rank) if policy == "priority" else running[-1]
