"""What happens to made-up requests, as the decode server would tell it; published event by event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lynx_net.integrations.http.bus import EventBus, RequestLog

LAYERS = 30
STREAMS = (("anchor", 5_600_000), ("residual", 4_100_000))
DRAFTS = ("The", " sky", " is", " blue", " since", " of", " dust")
KEPT = 4
"""So many of the drafts are accepted."""
FINAL = (" because", " shorter", " wavelengths", " of", " sunlight", " are", " scattered", " more", " than", " longer")
END = (" ones", ".")


def arriving(
    offer_s: float, seconds: float, streams: tuple[tuple[str, int], ...], lanes: int
) -> Iterator[dict[str, Any]]:
    """Progress, and which stream is ready, one stream after the other."""
    whole = sum(size for _, size in streams)
    before = 0
    for number, (name, size) in enumerate(streams):
        for part in (0.2, 0.5, 0.8, 1.0):
            got = before + int(size * part)
            amounts = [
                one if index < number else int(one * part) if index == number else 0
                for index, (_, one) in enumerate(streams)
            ]
            yield {
                "type": "progress",
                "at_s": offer_s + seconds * got / whole,
                "streams": amounts,
                "layers": [int(LAYERS * amount / one) for amount, (_, one) in zip(amounts, streams, strict=True)],
                "lanes": [got // lanes + 40_000 * (lane - lanes // 2) * (got > 400_000) for lane in range(lanes)],
            }
        before += size
        yield {"type": "ready", "at_s": offer_s + seconds * before / whole + 0.01, "stream": number, "name": name}


def story(
    *,
    prompt: str = "[user] Why is the sky blue?",
    drafts: tuple[str, ...] = DRAFTS,
    kept: int = KEPT,
    final: tuple[str, ...] = (*FINAL, *END),
    streams: tuple[tuple[str, int], ...] = STREAMS,
    lanes: int = 4,
    queued: bool = False,
) -> list[dict[str, Any]]:
    """A request from its arrival to its end, without `request`, `seq` and `time`."""
    events: list[dict[str, Any]] = [
        {
            "type": "request",
            "at_s": 0.0,
            "endpoint": "/v1/chat/completions",
            "model": "tiny",
            "prompt": prompt,
            "prompt_tokens": 1200,
            "max_tokens": 64,
            "temperature": 0.0,
            "stream": True,
            "drafts": False,
        },
    ]
    if queued:
        events.append({"type": "queued", "at_s": 0.001, "position": 2})
    events += [
        {"type": "started", "at_s": 0.08 if queued else 0.001, "queue_s": 0.08 if queued else 0.001},
        {
            "type": "offer",
            "at_s": 0.52,
            "codec": "plan",
            "tokens": 1199,
            "layers": LAYERS,
            "lanes": lanes,
            "streams": [{"name": name, "bytes": size} for name, size in streams],
            "prefill_queue_s": 0.0,
            "prefill_s": 0.4,
        },
    ]
    cache = list(arriving(0.53, 0.9, streams, lanes))
    anchor_s = next(event["at_s"] for event in cache if event["type"] == "ready")
    whole_s = cache[-1]["at_s"]
    made: list[dict[str, Any]] = []
    each_s = (whole_s - anchor_s) / max(len(drafts), 1)
    for index, text in enumerate(drafts):
        at_s = anchor_s + each_s * (index + 1)
        made.append({"type": "draft", "at_s": at_s, "index": index, "token": 100 + index, "text": text})
    events += sorted([*cache, *made], key=lambda event: event["at_s"])
    now_s = max(event["at_s"] for event in events) + 0.09
    if drafts:
        if kept < len(drafts):
            events.append({"type": "retract", "at_s": now_s, "count": len(drafts) - kept})
        texts = [*drafts[:kept], final[0]]
    else:
        texts = [final[0]]
    tokens = list(range(200, 200 + len(texts)))
    events += [
        {"type": "commit", "at_s": now_s, "index": 0, "tokens": tokens, "texts": texts, "accepted": len(texts) - 1},
        {"type": "first", "at_s": now_s, "ttft_s": now_s},
    ]
    for index, text in enumerate(final[1:], len(texts)):
        now_s += 0.06
        events.append(
            {"type": "commit", "at_s": now_s, "index": index, "tokens": [300 + index], "texts": [text], "accepted": 0}
        )
    count = len(texts) + len(final) - 1
    events.append(
        {
            "type": "done",
            "at_s": now_s,
            "finish_reason": "stop",
            "completion_tokens": count,
            "drafted": len(drafts),
            "accepted": len(texts) - 1,
            "ttft_s": now_s,
            "total_s": now_s,
        }
    )
    return events


def stored(*, fails: bool = False) -> list[dict[str, Any]]:
    """A request whose prefix comes from the store, with a long rest; or whose transfer from there fails in mid-way."""
    hit = {"type": "store", "at_s": 0.05, "outcome": "hit", "tokens": 1100, "rest": 100, "writing": False}
    begin, *end = story(drafts=() if not fails else DRAFTS)
    started, offer, *end = end
    from_store = offer | {"at_s": 0.06, "tokens": 1100, "prefill_s": None, "prefill_queue_s": None}
    if fails:
        early = [
            {"type": "progress", "at_s": 0.1, "streams": [1000, 0], "layers": [1, 0], "lanes": [1000, 0, 0, 0]},
            {"type": "store", "at_s": 0.2, "outcome": "failed", "reason": "its transfer failed: cut"},
        ]
        return [begin, started, hit, from_store, *early, offer, *end]
    first = next(index for index, event in enumerate(end) if event["type"] == "commit")
    rest = {"type": "rest", "at_s": end[first]["at_s"] - 0.01, "tokens": 99}
    return [begin, started, hit, from_store, *end[:first], rest, *end[first:]]


class Teller:
    """Publishes a story on a bus, as far as it is told to."""

    def __init__(self, bus: EventBus, request_id: str, events: list[dict[str, Any]]) -> None:
        self.log: RequestLog = bus.open(request_id, "tiny")
        self._left = list(events)

    def tell(self, upto: str | None = None, count: int = 1) -> None:
        """Publish up to and with the `count`-th further event of a type; without a type, to the end."""
        while self._left and count:
            event = dict(self._left.pop(0))
            kind, at_s = event.pop("type"), event.pop("at_s")
            self.log.publish(kind, self.log.started_s + at_s, **event)
            count -= kind == upto
