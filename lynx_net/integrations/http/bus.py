"""What happens to each request, as JSON events: kept for a while, and given to whoever watches.

Every event is an object with these fields:

    type      one of the words below
    request   id of the request ("chatcmpl-..." or "cmpl-...")
    seq       number of the event within its request, from 0
    at_s      seconds since the request arrived (of `request` itself: 0)
    time      seconds since 1970

and further ones by type, in the order in which they come:

    request    endpoint ("/v1/..."), model, prompt (the last 2,000 characters of its text), prompt_tokens,
               max_tokens, temperature, stream, drafts (whether the client sees them)
    queued     position (0 is next); only if it has to wait for its turn
    started    queue_s; its turn has come, and the store or the prefill server was asked
    store      outcome ("hit"; or "miss", "down", "slow" or "failed", with reason, a text: it goes on without it).
               After "hit", tokens (of the stored prefix), rest (the prompt's tokens behind it, the last one included),
               writing (the store is still getting it); another outcome may follow, if the transfer then fails
    offer      codec, tokens, layers, lanes (their number), streams: [{"name", "bytes"}], where bytes is the expected
               size of the stream (the largest possible one of an exact stream); prefill_queue_s, prefill_s: what the
               prefill server took, null if it comes from the store. The cache begins to arrive. A second one follows
               if that from the store does not arrive; drafts have been retracted then
    progress   streams: [bytes arrived of each], layers: [layers ready with each stream], lanes: [bytes arrived
               on each lane of the link since the offer was seen; other requests share the lanes]. Some times a
               second while it arrives, and once more when it is complete
    ready      stream (number), name ("anchor", "residual", ...): the whole cache is decoded with streams 0 to this one
    rest       tokens: so many behind a stored prefix, all but the prompt's last, are computed. Of a short rest there is
               no such event: it is computed with the first draft
    draft      index (position in the text's tokens, from 0), token, text: tentative
    retract    count: the last `count` drafts are void
    commit     index (of the first), tokens, texts (one for each token), accepted: final tokens; the first `accepted`
               of them were drafts, and those are now final. All other drafts have been retracted before.
    first      ttft_s; the first final token was sent to the client, or could have been
    done       finish_reason ("stop" or "length"), completion_tokens, drafted, accepted, ttft_s, total_s
    error      message, code, status; the request failed
    cancelled  the client left

A request's last event is `done`, `error` or `cancelled`, and there is exactly one of them. `text` of a token is what it
adds to the text; where a character has several tokens, all of it comes with the last one, and the others add nothing.

A subscriber to all requests gets first, without `request` and `seq`,

    recent     requests: [{"id", "model", "time", "state" ("running", or the type of its last event)}], newest first

and any subscriber that is too slow gets, in the place of what it missed,

    dropped    count
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lynx_net.aio.timeline import Timeline

__all__ = ["LAST_TYPES", "EventBus", "RequestLog", "Subscription"]

LAST_TYPES = frozenset({"done", "error", "cancelled"})

Event = dict[str, Any]


class RequestLog:
    """The events of one request. Made by `EventBus.open`."""

    def __init__(self, bus: EventBus, request_id: str, model: str, now_s: float) -> None:
        self.id = request_id
        self.model = model
        self.started_s = now_s
        """`time.monotonic` of its arrival."""
        self.time = time.time()
        self.events: list[Event] = []
        self.timeline: Timeline | None = None
        """Of its transfer, at the decode side."""
        self._bus = bus

    @property
    def ended(self) -> bool:
        """Whether its last event was published."""
        return bool(self.events) and self.events[-1]["type"] in LAST_TYPES

    def publish(self, kind: str, at_s: float | None = None, **fields: Any) -> None:
        """Add an event.

        Args:
            kind: its `type`.
            at_s: `time.monotonic` of when it happened; by default now.
        """
        since_s = (self._bus.clock() if at_s is None else at_s) - self.started_s
        event = {
            "type": kind,
            "request": self.id,
            "seq": len(self.events),
            "at_s": round(since_s, 6),
            "time": round(self.time + since_s, 6),
            **fields,
        }
        self.events.append(event)
        self._bus.published(self, event)

    def summary(self) -> Event:
        """One entry of `recent`."""
        state = self.events[-1]["type"] if self.ended else "running"
        return {"id": self.id, "model": self.model, "time": self.time, "state": state}


class EventBus:
    """Keeps the events of the last requests and hands them to subscribers. For one event loop, and one thread.

    Args:
        keep_requests, keep_events: of requests that have ended, at most so many are kept, and of them so many events.
        queue_events: events that wait for one subscriber; what is older is dropped, and the subscriber told.
    """

    def __init__(
        self,
        *,
        keep_requests: int = 256,
        keep_events: int = 50_000,
        queue_events: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._keep_requests = keep_requests
        self._keep_events = keep_events
        self._queue_events = queue_events
        self._running: OrderedDict[str, RequestLog] = OrderedDict()
        self._ended: OrderedDict[str, RequestLog] = OrderedDict()
        self._ended_events = 0
        self._subscribers: dict[str | None, set[Subscription]] = {}
        self._over = False

    def open(self, request_id: str, model: str) -> RequestLog:
        """A new request. It is kept until after its last event."""
        log = self._running[request_id] = RequestLog(self, request_id, model, self.clock())
        return log

    def find(self, request_id: str) -> RequestLog | None:
        """A request that runs or has ended lately."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def recent(self) -> list[RequestLog]:
        """All requests that are kept, newest first."""
        return sorted([*self._running.values(), *self._ended.values()], key=lambda log: -log.started_s)

    def subscribe(self, request_id: str | None = None) -> Subscription:
        """Use it as `with bus.subscribe() as events: async for event in events`.

        Args:
            request_id: a request to follow from its first event to its last; None follows all from now on.

        Raises:
            KeyError: there is no such request any more.
        """
        if request_id is None:
            first = [{"type": "recent", "requests": [log.summary() for log in self.recent()]}]
            return Subscription(self._subscribers, None, first, self._queue_events, ended=self._over)
        log = self.find(request_id)
        if log is None:
            raise KeyError(request_id)
        return Subscription(
            self._subscribers, request_id, log.events, self._queue_events, ended=self._over or log.ended
        )

    def end(self) -> None:
        """End all subscriptions: the server closes."""
        self._over = True
        for subscribers in list(self._subscribers.values()):
            for one in list(subscribers):
                one.end()

    def published(self, log: RequestLog, event: Event) -> None:
        """Called by a request's log."""
        last = event["type"] in LAST_TYPES
        for one in self._subscribers.get(None, ()):
            one.put(event)
        for one in self._subscribers.get(log.id, ()):
            one.put(event)
            if last:
                one.end()
        if last:
            self._running.pop(log.id, None)
            self._ended[log.id] = log
            self._ended_events += len(log.events)
            while len(self._ended) > self._keep_requests or (
                self._ended_events > self._keep_events and len(self._ended) > 1
            ):
                _, dropped = self._ended.popitem(last=False)
                self._ended_events -= len(dropped.events)


class Subscription:
    """An iteration over events, with a bound on those that wait."""

    def __init__(
        self,
        registry: dict[str | None, set[Subscription]],
        key: str | None,
        first: Iterable[Event],
        bound: int,
        *,
        ended: bool,
    ) -> None:
        self._registry = registry
        self._key = key
        self._first = deque(first)  # what is kept anyway needs no bound
        self._waiting: deque[Event] = deque()
        self._bound = bound
        self._dropped = 0
        self._ended = ended
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Called by the bus."""
        if len(self._waiting) >= self._bound:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._changed.set()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._changed.set()

    def __enter__(self) -> Self:
        self._registry.setdefault(self._key, set()).add(self)
        return self

    def __exit__(self, *_error: object) -> None:
        subscribers = self._registry[self._key]
        subscribers.discard(self)
        if not subscribers:
            del self._registry[self._key]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self._first:
                return self._first.popleft()
            if self._dropped:
                count, self._dropped = self._dropped, 0
                return {"type": "dropped", "count": count}
            if self._waiting:
                return self._waiting.popleft()
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
