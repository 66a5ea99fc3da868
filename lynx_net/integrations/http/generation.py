"""The text of one answer, from the decode loop's tokens: stop texts, how it ends, and how long everything took."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.integrations.http.text import TextStream
from lynx_net.speculation import Commit, Done, Draft, Retract

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from lynx_net.integrations.http.answers import FinishReason
    from lynx_net.integrations.http.bus import RequestLog
    from lynx_net.integrations.http.engine import DecodeEngine
    from lynx_net.integrations.http.jobs import Job

__all__ = ["Committed", "Drafted", "Finished", "Piece", "Retracted", "generation"]


@dataclass(frozen=True, slots=True)
class Committed:
    """Final tokens and the text that is certain with them; the text of a token may come with a later one.

    Attributes:
        tokens: how many.
        accepted: so many drafts, the oldest ones, are final now; there are no others left.
        text: may be empty.
    """

    tokens: int
    accepted: int
    text: str


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tentative token."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class Retracted:
    """The newest drafts are void."""

    count: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the answer."""

    reason: FinishReason
    completion_tokens: int
    drafted: int
    accepted: int
    ttft_s: float
    total_s: float

    def to_event(self) -> dict[str, Any]:
        """The fields of the bus's `done`."""
        return {
            "finish_reason": self.reason,
            "completion_tokens": self.completion_tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "ttft_s": round(self.ttft_s, 6),
            "total_s": round(self.total_s, 6),
        }

    def timings(self) -> dict[str, Any]:
        """What a client gets that asks for `lynx.timings`."""
        return {
            "type": "timings",
            "ttft_s": round(self.ttft_s, 6),
            "total_s": round(self.total_s, 6),
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


Piece = Committed | Drafted | Retracted | Finished


async def generation(
    engine: DecodeEngine, job: Job, stop: Sequence[str], log: RequestLog
) -> AsyncGenerator[Piece, None]:
    """Decode a request into pieces; the last one is Finished. Errors and cancellation: see `DecodeEngine.generate`."""
    text = TextStream(engine.model.decode, job.prompt, stop)
    completion_tokens = drafted = accepted = 0
    ttft_s: float | None = None
    last: int | None = None
    async with aclosing(engine.generate(job, log)) as events:
        async for event in events:
            match event:
                case Draft(token=token):
                    drafted += 1
                    yield Drafted(token, engine.model.decode([token]))
                case Retract(count=count):
                    yield Retracted(count)
                case Commit(tokens=tokens, at_s=at_s):
                    if ttft_s is None:
                        ttft_s = at_s - log.started_s
                        log.publish("first", at_s, ttft_s=round(ttft_s, 6))
                    accepted += event.accepted
                    fresh = ""
                    for token in tokens:
                        last = token
                        completion_tokens += 1
                        if token not in engine.model.stop_tokens:
                            fresh += text.push([token])
                        if text.stopped:
                            break
                    yield Committed(len(tokens), event.accepted, fresh)
                case Done():
                    pass
            if text.stopped:
                break
    rest = text.finish()
    if rest:
        yield Committed(0, 0, rest)
    stopped = text.stopped or last in engine.model.stop_tokens
    assert ttft_s is not None
    total_s = engine.clock() - log.started_s
    yield Finished("stop" if stopped else "length", completion_tokens, drafted, accepted, ttft_s, total_s)
