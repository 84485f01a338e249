"""Who waits in which order, and who is preempted first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from minivllm.config import Policy
from minivllm.request import Request


class WaitingQueue(Protocol):
    """Requests that hold no blocks."""

    def push(self, request: Request) -> None:
        """A new request."""

    def push_back(self, request: Request) -> None:
        """A preempted request comes back."""

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served; preempted requests return to the front, so admission order stays arrival order."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def push_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


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


def make_queue(policy: Policy) -> WaitingQueue:
    return PriorityQueue() if policy == "priority" else FcfsQueue()


def pick_victim(running: list[Request], policy: Policy) -> Request:
    """Whom to preempt when blocks run out: the last admitted, or under priority the least important."""
    return max(running, key=rank) if policy == "priority" else running[-1]
