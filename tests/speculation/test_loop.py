from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculation_toys import HashModel, Offer, ScriptedTransfer, replay

from lynx_net.errors import ConnectionLostError, LocalProtocolError
from lynx_net.speculation import Commit, Done, Draft, Retract, decode, decode_plain

PROMPT_TAIL = [2]


def plain(seed, **kwargs):
    return decode_plain(HashModel(seed, full=True), PROMPT_TAIL, **kwargs)


async def until(condition):
    """Wait for something that a worker thread does."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in a thread that knows no event
            await asyncio.sleep(0.001)


async def collect_into(events, run, then=lambda: None):
    async for event in run:
        events.append(event)
        then()


async def collect(model, transfer, **kwargs):
    return [event async for event in decode(model, transfer, prompt_tail=PROMPT_TAIL, **kwargs)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    ready_after=st.integers(0, 14),
    max_new_tokens=st.integers(1, 12),
    max_drafts=st.integers(0, 10),
    stop_tokens=st.sets(st.integers(0, 6), max_size=2),
    with_first=st.booleans(),
)
def test_greedy_equals_plain_decoding_on_q_full(
    seed, noise, ready_after, max_new_tokens, max_drafts, stop_tokens, with_first
):
    expected = plain(seed, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens)

    async def main():
        model = HashModel(seed, noise=noise)
        transfer = ScriptedTransfer(model, Offer(expected[0] if with_first else None))
        transfer.finish_after(ready_after, fallback_s=0.005)
        events = await collect(
            model, transfer, max_new_tokens=max_new_tokens, max_drafts=max_drafts, stop_tokens=stop_tokens
        )
        return model, events

    model, events = asyncio.run(main())
    final, tentative = replay(events)
    assert final == expected
    assert not tentative
    done = events[-1]
    assert isinstance(done, Done)
    assert done.drafted <= min(max_drafts, max_new_tokens)
    if ready_after == 0:
        assert done.drafted == 0
    if noise == 0.0:
        assert done.accepted == done.drafted
        assert not any(isinstance(event, Retract) for event in events)
    if done.drafted or not with_first or len(expected) > 1:
        # every final token but the last is in the cache, and all of it was computed on Q_full
        assert [token for token, _ in model.entries[model.prompt :]] == PROMPT_TAIL + expected[:-1]
        assert all(full for _, full in model.entries)


async def test_verification_is_one_forward_over_everything_unfed():
    model = HashModel(1, noise=0.0)
    transfer = ScriptedTransfer(model)
    transfer.finish_after(5)
    events = await collect(model, transfer, max_new_tokens=8)
    assert [type(event) for event in events] == [Draft] * 5 + [Commit] * 3 + [Done]
    assert model.calls == [1] * 5 + [6] + [1] * 2
    assert events[5].accepted == 5
    assert len(events[5].tokens) == 6


async def test_drafting_stops_at_a_drafted_stop_token_and_waits():
    expected = plain(3, max_new_tokens=9)
    stop = expected[4]
    drafts = expected.index(stop) + 1
    model = HashModel(3, noise=0.0)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)
    task = asyncio.create_task(collect(model, transfer, max_new_tokens=9, stop_tokens=[stop]))
    await until(lambda: len(model.calls) == drafts)
    await asyncio.sleep(0.02)
    assert model.calls == [1] * drafts
    assert not task.done()
    transfer.finish()
    events = await task
    assert replay(events)[0] == expected[:drafts]
    assert model.calls == [1] * drafts + [drafts]  # no row is computed for a token behind the end


async def test_first_token_is_committed_before_anything_arrives():
    model = HashModel(4)
    transfer = ScriptedTransfer(model, Offer(first_token=plain(4, max_new_tokens=1)[0]))
    async with aclosing(decode(model, transfer, prompt_tail=PROMPT_TAIL, max_new_tokens=5)) as run:
        first = await anext(run)
        assert first == Commit((transfer.offer.first_token,), 0, first.at_s)
        assert model.calls == []
        transfer.finish_after(2)
        events = [first, *[event async for event in run]]
    assert replay(events)[0] == plain(4, max_new_tokens=5)
    assert model.calls[0] == 2  # the prompt's last token and the given one


async def test_first_token_alone_is_enough():
    model = HashModel(4)
    transfer = ScriptedTransfer(model, Offer(first_token=6))
    for kwargs in ({"max_new_tokens": 1}, {"stop_tokens": [6]}):
        events = await collect(model, transfer, **kwargs)
        assert [type(event) for event in events] == [Commit, Done]
    assert model.calls == []


async def test_token_times_tell_when_a_valid_token_was_there():
    model = HashModel(2, noise=0.5)
    transfer = ScriptedTransfer(model)
    transfer.finish_after(6)
    events = await collect(model, transfer, max_new_tokens=10)
    done = events[-1]
    drafted_at = [event.at_s for event in events if isinstance(event, Draft)]
    assert 0 < done.accepted < done.drafted == 6  # this seed: some drafts stand, some fall
    assert list(done.token_times_s[: done.accepted]) == drafted_at[: done.accepted]
    assert done.token_times_s[done.accepted] == done.verified_at_s


async def test_failure_after_drafts_retracts_them_and_raises_the_typed_error():
    model = HashModel(5, noise=0.0)
    transfer = ScriptedTransfer(model, Offer(first_token=1))
    transfer.anchor_ready.set(0.0)
    events = []

    def fail_after_three_drafts():
        if len(events) == 4:
            transfer.residual_ready.fail(ConnectionLostError("gone"))

    run = decode(model, transfer, prompt_tail=PROMPT_TAIL, max_new_tokens=20)
    with pytest.raises(ConnectionLostError, match="gone"):
        await collect_into(events, run, fail_after_three_drafts)
    assert [type(event) for event in events] == [Commit, Draft, Draft, Draft, Retract]
    assert replay(events) == ([1], [])
    assert model.length == model.prompt


async def test_failure_while_waiting_for_the_residual():
    model = HashModel(5, noise=0.0)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)
    asyncio.get_running_loop().call_later(0.02, transfer.residual_ready.fail, ConnectionLostError("gone"))
    events = []
    with pytest.raises(ConnectionLostError):
        await collect_into(events, decode(model, transfer, prompt_tail=PROMPT_TAIL, max_drafts=2))
    assert [type(event) for event in events] == [Draft, Draft, Retract]


@pytest.mark.parametrize("first", [None, 3])
async def test_failure_before_the_anchors(first):
    model = HashModel(5)
    transfer = ScriptedTransfer(model, Offer(first))
    transfer.anchor_ready.fail(ConnectionLostError("gone"))
    transfer.residual_ready.fail(ConnectionLostError("gone"))
    events = []
    with pytest.raises(ConnectionLostError):
        await collect_into(events, decode(model, transfer, prompt_tail=PROMPT_TAIL))
    assert replay(events) == ([] if first is None else [3], [])


async def test_an_error_of_the_model_passes_through():
    model = HashModel(6)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)

    def fail(_count):
        raise ZeroDivisionError("the model failed")

    model.after_call = fail
    with pytest.raises(ZeroDivisionError):
        await collect(model, transfer)


class SlowModel(HashModel):
    """Every forward waits for a permit of the test."""

    def __init__(self, seed, **kwargs):
        super().__init__(seed, **kwargs)
        self.permits = threading.Semaphore(0)
        self.entered = 0

    def forward(self, tokens):
        self.entered += 1
        assert self.permits.acquire(timeout=10)
        return super().forward(tokens)


@pytest.mark.parametrize("forwards_before", range(8))
@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancel_in_every_forward_leaves_the_model_usable(forwards_before, cancels):
    """Four drafts, a verification and plain decoding: cancel in each of these passes."""
    model = SlowModel(8, noise=0.5)
    transfer = ScriptedTransfer(model)
    transfer.finish_after(4)
    events = []
    run = decode(model, transfer, prompt_tail=PROMPT_TAIL, max_new_tokens=12)
    task = asyncio.create_task(collect_into(events, run))
    for _ in range(forwards_before):
        model.permits.release()
    await until(lambda: model.entered == forwards_before + 1)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0.005)
        assert not task.done(), "control came back in mid-forward"
    model.permits.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not model.running
    final, _ = replay(events)
    assert [token for token, _ in model.entries[model.prompt :]] == (PROMPT_TAIL + final)[
        : len(model.entries) - model.prompt
    ]
    assert all(full for _, full in model.entries)
    model.full = True
    model.after_call = lambda _count: None
    for _ in range(40):
        model.permits.release()
    fed = model.length - model.prompt
    rest = decode_plain(model, (PROMPT_TAIL + final)[fed:], max_new_tokens=12 - len(final))
    assert final + rest == plain(8, max_new_tokens=12)


async def test_leaving_the_iteration_early_rewinds_the_model():
    model = HashModel(9)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)
    async with aclosing(decode(model, transfer, prompt_tail=PROMPT_TAIL)) as run:
        async for event in run:
            assert isinstance(event, Draft)
            if len(model.calls) == 3:
                break
    assert model.length == model.prompt
    assert not [t for t in threading.enumerate() if t.name.startswith("lynx-decode")]


async def test_the_event_loop_stays_live_during_a_forward():
    model = SlowModel(10)
    transfer = ScriptedTransfer(model)
    transfer.finish()
    task = asyncio.create_task(collect(model, transfer, max_new_tokens=1))
    ticks = 0
    await until(lambda: model.entered == 1)
    for _ in range(50):
        await asyncio.sleep(0)
        ticks += 1
    assert ticks == 50
    assert not task.done()
    model.permits.release()
    assert replay(await task)[0] == plain(10, max_new_tokens=1)


async def test_sampling_is_reproducible_and_depends_on_the_seed():
    async def tokens(seed):
        model = HashModel(12, noise=0.7)
        transfer = ScriptedTransfer(model)
        transfer.finish_after(4)
        return replay(await collect(model, transfer, max_new_tokens=10, temperature=1.0, seed=seed))[0]

    assert await tokens(1) == await tokens(1)
    assert len({tuple(await tokens(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 0},
        {"max_drafts": -1},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"prompt_tail": []},
    ],
)
async def test_arguments_out_of_range(kwargs):
    model = HashModel(1)
    arguments = {"prompt_tail": PROMPT_TAIL, **kwargs}
    with pytest.raises(LocalProtocolError):
        await anext(decode(model, ScriptedTransfer(model), **arguments))


@pytest.mark.parametrize("before", [0, 1, 4])
async def test_verification_waits_for_the_exact_stream_if_told_to(before):
    """The residual comes after `before` drafts and makes nothing final; drafting goes on till the exact bits are in."""
    expected = plain(8, max_new_tokens=12)
    model = HashModel(8, noise=0.3)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)
    loop = asyncio.get_running_loop()

    def finish():
        model.full = True  # the unquantised cache: Q_full counts as coarse here
        transfer.exact_ready.set(0.0)

    def after_call(count):
        if count == before:
            loop.call_soon_threadsafe(transfer.residual_ready.set, 0.0)
        if count == before + 3:
            loop.call_soon_threadsafe(finish)

    model.after_call = after_call
    if not before:
        transfer.residual_ready.set(0.0)
    asked = {"verify_on": "exact"}
    if before % 2:
        transfer.stream_names = ("anchor", "residual", "exact")  # then it is the default
        asked = {}
    events = await collect(model, transfer, max_new_tokens=12, **asked)
    assert replay(events)[0] == expected
    assert [type(event) for event in events[: before + 3]] == [Draft] * (before + 3)
    assert events[-1].drafted == before + 3
    assert all(full for _, full in model.entries)


async def test_a_failure_after_the_residual_retracts_drafts_that_wait_for_the_exact_stream():
    model = HashModel(8, noise=0.3)
    transfer = ScriptedTransfer(model)
    transfer.anchor_ready.set(0.0)
    transfer.residual_ready.set(0.0)
    events = []
    task = asyncio.create_task(
        collect_into(events, decode(model, transfer, prompt_tail=PROMPT_TAIL, max_drafts=2, verify_on="exact"))
    )
    await until(lambda: len(model.calls) == 2)
    transfer.exact_ready.fail(ConnectionLostError("gone"))
    with pytest.raises(ConnectionLostError):
        await task
    assert [type(event) for event in events] == [Draft, Draft, Retract]
    assert model.length == model.prompt


@pytest.mark.parametrize("verify_on", ["anchor", "", 7])
async def test_what_cannot_be_verified_on(verify_on):
    model = HashModel(1)
    with pytest.raises(LocalProtocolError, match='verify_on must be "residual" or "exact"'):
        await anext(decode(model, ScriptedTransfer(model), prompt_tail=PROMPT_TAIL, verify_on=verify_on))
