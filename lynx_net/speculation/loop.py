"""The decode loop: draft on anchors while the rest is on its way, verify, go on (Lynx section 4.2, 4.3).

The loop itself runs on the event loop and only decides; forward passes run in one worker thread, one
at a time. Positions of drafts were computed on anchors, so verification forgets them and computes them
again, all in one pass over the unfed tokens and the drafts, on Q_full or on the exact cache.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal

import numpy as np

from lynx_net.aio.offload import run_or_withdraw
from lynx_net.aio.timeline import has_exact
from lynx_net.errors import LocalProtocolError, LynxError
from lynx_net.speculation.events import Commit, Done, Draft, Retract
from lynx_net.speculation.policy import Action, Limits, is_finished, next_action
from lynx_net.speculation.sampling import draw, probabilities
from lynx_net.speculation.verify import Verdict, verify_greedy, verify_sampled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lynx_net.speculation.events import Event
    from lynx_net.speculation.protocols import DecodeModel, ProgressiveTransfer, Readiness

__all__ = ["checked_limits", "decode"]


async def decode(
    model: DecodeModel,
    transfer: ProgressiveTransfer,
    *,
    prompt_tail: Sequence[int],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    max_drafts: int = 64,
    verify_on: Literal["residual", "exact"] | None = None,
    executor: Executor | None = None,
) -> AsyncGenerator[Event, None]:
    """Decode from a cache that is still arriving. Iterate over the result with `async for`.

    Before every draft the loop looks whether what drafts are verified on is in: the last stream, unless
    `verify_on` says otherwise. Drafting stops at `max_drafts`, at `max_new_tokens`, or after a stop
    token; then the loop waits. Every stream that comes in meanwhile makes the next drafts better. If everything
    is in before the first draft, as on a fast link or with a codec of one stream, there are no drafts. With
    temperature 0 the final tokens are those of `decode_plain` on Q_full, or on the unquantised cache of the
    sender; above 0 they have the same distribution.

    The loop advances only while the caller asks for events; a slow caller delays the next draft.

    Args:
        model: its cache is the transfer's target and holds the prompt without `prompt_tail`. It
            is the loop's until the iteration has ended.
        transfer: the arriving cache. With `offer.first_token` that token is committed at once.
        prompt_tail: the last token or tokens of the prompt, which the cache does not hold; may be
            empty only if the offer has a first token.
        max_new_tokens: final tokens at most. The cache needs room for `len(prompt_tail)` plus these.
        temperature: 0 takes the best token, above 0 draws.
        seed: of all draws.
        stop_tokens: tokens that end the text; the stop token itself is committed.
        max_drafts: 0 switches speculation off.
        verify_on: "exact" makes tokens final on the bits that the sender has, for which the codec must have an exact
            stream and the target must keep them: of the sender's dtype, or float32. "residual" does it on Q_full; if
            an exact stream follows, the cache changes under the final tokens, which come earlier but are then
            those of neither cache. By default "exact" where the transfer has such a stream.
        executor: runs the forward passes, one at a time; by default a thread of this call's own.
            Give the same one to every loop that shares a model.

    Yields:
        Draft, Retract, Commit, and one Done at the end; see `lynx_net.speculation.events`.

    Raises:
        LocalProtocolError: an argument is out of range, or the codec has no exact stream to verify on.
        LynxError: the transfer's error, if it fails before what drafts are verified on is in. Drafts were retracted
            before, committed tokens stand. A failure is noticed before the next draft.

    Cancellation, and leaving the iteration early (close the generator: `contextlib.aclosing`): a running forward
    pass is waited for, one that waits for its thread is withdrawn; then the model is back at the prompt and the
    tokens verified so far, and usable.
    """
    limits = checked_limits(
        prompt_tail, max_new_tokens, temperature, stop_tokens, max_drafts, transfer.offer.first_token
    )
    target = _verify_target(transfer, verify_on)
    own = ThreadPoolExecutor(1, "lynx-decode") if executor is None else None
    try:
        run = _Run(model, prompt_tail, limits, temperature, seed, executor or own)
        try:
            async with aclosing(_steps(run, transfer, target)) as steps:
                async for event in steps:
                    yield event
        finally:
            run.rewind()
    finally:
        if own is not None:
            own.shutdown()


def checked_limits(
    prompt_tail: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    stop_tokens: Collection[int],
    max_drafts: int,
    first_token: int | None = None,
) -> Limits:
    """Refuse arguments out of range, with a sentence that names them."""
    if not prompt_tail and first_token is None:
        raise LocalProtocolError("prompt_tail must hold the last token of the prompt")
    if max_new_tokens < 1 or max_drafts < 0:
        raise LocalProtocolError(f"max_new_tokens must be 1 or more, not {max_new_tokens}; max_drafts 0 or more")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise LocalProtocolError(f"temperature must be 0 or a positive number, not {temperature}")
    return Limits(max_new_tokens, max_drafts, frozenset(stop_tokens))


def _verify_target(transfer: ProgressiveTransfer, verify_on: str | None) -> Readiness:
    """What makes the cache good enough for final tokens."""
    if verify_on is None:
        # Transfers that do not name their streams have no exact one.
        verify_on = "exact" if has_exact(getattr(transfer, "stream_names", ())) else "residual"
    if verify_on == "residual":
        return transfer.residual_ready
    if verify_on == "exact":
        return transfer.exact_ready
    raise LocalProtocolError(f'verify_on must be "residual" or "exact", not {verify_on!r}')


async def _steps(run: _Run, transfer: ProgressiveTransfer, target: Readiness) -> AsyncGenerator[Event, None]:
    """The steps of one run, as the policy decides them."""
    if transfer.offer.first_token is not None:
        yield run.commit_first(transfer.offer.first_token)
    started = False
    while not is_finished(run.limits, run.committed):
        try:
            if not started:
                await transfer.anchor_ready
                started = True
            ready = target.done()  # raises if the transfer has failed
            action = next_action(run.limits, run.committed, run.drafts, verify_ready=ready)
            if action is Action.WAIT:
                await target
                continue
        except LynxError:
            if run.drafts:
                yield run.retract(len(run.drafts), time.monotonic())
            raise
        match action:
            case Action.DRAFT:
                yield await run.draft()
            case Action.VERIFY:
                for event in await run.verify():
                    yield event
            case Action.DECODE:
                yield await run.decode()
    yield run.finish()


class _Run:
    """The state of one decode loop."""

    def __init__(
        self,
        model: DecodeModel,
        prompt_tail: Sequence[int],
        limits: Limits,
        temperature: float,
        seed: int,
        executor: Executor | None,
    ) -> None:
        self.limits = limits
        self.committed: list[int] = []
        self.drafts: list[int] = []
        self._model = model
        self._temperature = temperature
        self._rng = np.random.default_rng(seed)
        self._executor = executor
        self._base = model.length  # positions that are prompt or verified
        self._unfed = list(prompt_tail)  # final tokens behind them that the model has not seen on the final cache
        self._draft_rows: list[NDArray[np.float32]] = []
        self._draft_times_s: list[float] = []
        self._times_s: list[float] = []
        self._drafted = 0
        self._accepted = 0
        self._verified_at_s: float | None = None

    def commit_first(self, token: int) -> Commit:
        """Take over the exact first token of the offer."""
        self._unfed.append(token)
        return self._commit([token], 0, time.monotonic())

    async def draft(self) -> Draft:
        """Decode one token from the cache as it is."""
        row = (await run_or_withdraw(self._executor, self._model.forward, self.drafts[-1:] or self._unfed))[-1]
        if self._temperature > 0:
            self._draft_rows.append(probabilities(row, self._temperature))
            token = draw(self._draft_rows[-1], self._rng)
        else:
            token = int(row.argmax())
        self.drafts.append(token)
        self._drafted += 1
        self._draft_times_s.append(time.monotonic())
        return Draft(token, self._draft_times_s[-1])

    async def verify(self) -> list[Event]:
        """Judge all drafts in one pass on the final cache and take over what stands."""
        open_tokens = self.limits.max_new_tokens - len(self.committed)
        last_is_final = self.drafts[-1] in self.limits.stop_tokens or len(self.drafts) == open_tokens
        fed = self.drafts[:-1] if last_is_final else self.drafts  # no row for a token that cannot follow

        def judge() -> NDArray[np.float32]:
            self._model.truncate(self._base)
            return self._model.forward([*self._unfed, *fed])

        rows = (await run_or_withdraw(self._executor, judge))[len(self._unfed) - 1 :]
        verdict = self._judge(rows)
        now_s = self._verified_at_s = time.monotonic()
        events: list[Event] = []
        if verdict.accepted < len(self.drafts):
            events.append(self.retract(len(self.drafts) - verdict.accepted, now_s))
        tokens = [*self.drafts, *([] if verdict.next_token is None else [verdict.next_token])]
        self._base += len(self._unfed) + len(tokens) - 1
        self._unfed = tokens[-1:]
        self._model.truncate(self._base)
        self._accepted = verdict.accepted
        events.append(self._commit(tokens, verdict.accepted, now_s))
        return events

    async def decode(self) -> Commit:
        """Decode one final token on the final cache."""
        row = (await run_or_withdraw(self._executor, self._model.forward, self._unfed))[-1]
        token = draw(probabilities(row, self._temperature), self._rng) if self._temperature > 0 else int(row.argmax())
        self._base += len(self._unfed)
        self._unfed = [token]
        return self._commit([token], 0, time.monotonic())

    def retract(self, count: int, now_s: float) -> Retract:
        """Void the newest drafts."""
        del self.drafts[-count:]
        return Retract(count, now_s)

    def finish(self) -> Done:
        """Sum up."""
        return Done(
            tuple(self.committed),
            self._drafted,
            self._accepted,
            self._verified_at_s,
            tuple(self._times_s),
            time.monotonic(),
        )

    def rewind(self) -> None:
        """Forget what is not verified. No forward pass runs here: every one was waited for."""
        if self._model.length > self._base:
            self._model.truncate(self._base)

    def _judge(self, rows: NDArray[np.float32]) -> Verdict:
        if self._temperature > 0:
            return verify_sampled(self.drafts, self._draft_rows, probabilities(rows, self._temperature), self._rng)
        return verify_greedy(self.drafts, rows)

    def _commit(self, tokens: list[int], accepted: int, now_s: float) -> Commit:
        self.committed += tokens
        self._times_s += [*self._draft_times_s[:accepted], *[now_s] * (len(tokens) - accepted)]
        self.drafts.clear()
        return Commit(tuple(tokens), accepted, now_s)
