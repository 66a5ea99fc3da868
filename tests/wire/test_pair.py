"""Two cores, several lanes, any interleaving: every transfer ends exactly once on both sides, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from pairkit import Pair, Side
from wirekit import LAYOUT, STREAMS

from lynx_net.errors import RemoteProtocolError
from lynx_net.wire.events import (
    LayerReady,
    OfferReceived,
    StreamReady,
    TransferComplete,
    TransferDelivered,
    TransferFailed,
)
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import AbortCode, Received

EMPTY = CacheLayout(layers=2, tokens=0, heads=1, key_size=4, value_size=4)


class TwoCores(RuleBasedStateMachine):
    @initialize(lanes=st.integers(1, 3), seed=st.integers(0, 10**6))
    def start(self, lanes: int, seed: int) -> None:
        self.pair = Pair(lanes, seed)
        self.offered: list[tuple[int, int]] = []
        self.aborted: set[int] = set()
        self.requested = 0

    def pick(self, which: int) -> tuple[Side, int]:
        side, transfer = self.offered[which % len(self.offered)]
        return self.pair.sides[side], transfer

    @rule(side=st.integers(0, 1), whole=st.booleans(), empty=st.sampled_from([False, False, False, True]))
    def offer(self, side: int, whole: bool, empty: bool) -> None:
        if len(self.offered) < 12:
            layout = EMPTY if empty else LAYOUT
            self.offered.append((side, self.pair.sides[side].offer(submit=whole, layout=layout)))

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 100), count=st.integers(1, 30))
    def submit(self, which: int, count: int) -> None:
        side, transfer = self.pick(which)
        for _ in range(count):
            if side.unsubmitted[transfer] and transfer not in side.ended:
                side.submit(transfer)

    @rule(count=st.integers(1, 60))
    def move(self, count: int) -> None:
        for _ in range(count):
            self.pair.move()

    @rule(lane=st.integers(0, 2))
    def lose(self, lane: int) -> None:
        self.pair.lose(lane % self.pair.lanes)

    @rule(side=st.integers(0, 1), index=st.integers(0, 100))
    def take(self, side: int, index: int) -> None:
        receiver = self.pair.sides[side]
        if receiver.offers:
            receiver.take(index % len(receiver.offers))

    @rule(side=st.integers(0, 1), index=st.integers(0, 1000), count=st.integers(1, 20))
    def decode(self, side: int, index: int, count: int) -> None:
        receiver = self.pair.sides[side]
        for _ in range(count):
            if receiver.to_decode:
                receiver.decode(index % len(receiver.to_decode))

    @precondition(lambda self: self.offered)
    @rule(which=st.integers(0, 100), at_sender=st.booleans(), code=st.sampled_from([1, 2, 3, 5, 200]))
    def abort(self, which: int, at_sender: bool, code: int) -> None:
        side, transfer = self.pick(which)
        other = self.pair.right if side is self.pair.left else self.pair.left
        aborting = side if at_sender else other
        known = transfer in aborting.core.open_transfers()
        before = len(aborting.log)
        aborting.abort(transfer, code)
        assert len(aborting.log) - before == known
        if known:
            self.aborted.add(transfer)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.pair.advance(seconds)
        for side in self.pair.sides:
            side.timer()

    @rule(side=st.integers(0, 1), answer=st.integers(0, 2))
    def ask(self, side: int, answer: int) -> None:
        asking, asked = self.pair.sides[side], self.pair.sides[1 - side]
        if self.requested < 3:
            self.requested += 1
            asking.core.request(f"request {self.requested}", {})
        if asked.requests and answer == 1:
            asked.core.outgoing.refuse(asked.requests.pop(), "no")
        elif asked.requests and answer == 2 and len(self.offered) < 12:
            self.offered.append((1 - side, asked.offer(request_id=asked.requests.pop())))

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for side, transfer in self.offered:
            sender = self.pair.sides[side]
            while sender.unsubmitted[transfer] and transfer not in sender.ended:
                sender.submit(transfer)
        self.pair.settle()
        for side, transfer in self.offered:
            sender, receiver = self.pair.sides[side], self.pair.sides[1 - side]
            self.check_ends(sender, receiver, transfer)
        self.pair.check_empty()
        for side in self.pair.sides:
            for wire in side.out:
                assert not wire.data
                assert wire.reader.idle
                assert wire.waiting is None

    def check_ends(self, sender: Side, receiver: Side, transfer: int) -> None:
        at_sender, at_receiver = sender.ended[transfer], receiver.ended.get(transfer)
        knows = any(isinstance(event, OfferReceived) and event.offer.transfer == transfer for event in receiver.log)
        if transfer not in self.aborted:
            overloaded = isinstance(at_receiver, TransferFailed) and "too many" in str(at_receiver.error)
            if not overloaded:
                assert isinstance(at_sender, TransferDelivered)
        if isinstance(at_sender, TransferDelivered):
            assert isinstance(at_receiver, TransferComplete)
        if isinstance(at_receiver, TransferFailed) or not knows:
            assert isinstance(at_sender, TransferFailed)
        if isinstance(at_receiver, TransferComplete):
            ready = {event for event in receiver.ready if event.transfer == transfer}
            every = {StreamReady(transfer, stream) for stream in range(STREAMS)}
            every |= {LayerReady(transfer, layer, stream) for layer in range(2) for stream in range(STREAMS)}
            assert ready == every


TestTwoCores = TwoCores.TestCase
TestTwoCores.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_both_sides_send_at_once_over_several_lanes(lanes: int) -> None:
    pair = Pair(lanes, seed=lanes)
    sent = [
        (side, other, side.offer())
        for side, other in ((pair.left, pair.right), (pair.right, pair.left))
        for _ in range(3)
    ]
    pair.settle()
    for side, other, transfer in sent:
        assert side.ended[transfer] == TransferDelivered(transfer)
        assert other.ended[transfer] == TransferComplete(transfer)
    pair.check_empty()


@pytest.mark.parametrize("moment", range(0, 400, 9))
@pytest.mark.parametrize("at_sender", [True, False])
def test_an_abort_at_any_moment(moment: int, at_sender: bool) -> None:
    pair = Pair(3, seed=moment)
    doomed, healthy = pair.left.offer(), pair.left.offer()
    for _ in range(moment):
        pair.move()
        if pair.right.offers:
            pair.right.take()
        if pair.right.to_decode and moment % 2:
            pair.right.decode()
    (pair.left if at_sender else pair.right).abort(doomed, AbortCode.CANCELLED)
    pair.settle()
    assert pair.left.ended[healthy] == TransferDelivered(healthy)
    assert doomed in pair.left.ended
    pair.check_empty()


def test_a_segment_that_overtakes_its_offer_waits_for_it() -> None:
    pair = Pair(2)
    transfer = pair.left.offer()
    assert pair.left.send(1)  # a segment, on lane 1
    assert pair.left.send(0)  # the offer, on lane 0
    while pair.right.receive(1, 10_000):
        pass
    assert pair.right.inbound[1].waiting is not None
    pair.right.receive(0, 10_000)
    assert not pair.right.receive(1, 10_000)  # known, but not decided on
    pair.settle()
    assert pair.right.ended[transfer] == TransferComplete(transfer)


def test_a_segment_that_waited_for_an_offer_that_was_declined_is_dropped() -> None:
    pair = Pair(2)
    transfer = pair.left.offer()
    for lane in (1, 0):
        pair.left.send(lane)
    pair.settle(take=False)
    assert pair.right.inbound[1].waiting is not None
    pair.right.abort(transfer, AbortCode.RECEIVER_FAILED)
    pair.settle()
    assert pair.right.inbound[1].waiting is None
    assert isinstance(pair.left.ended[transfer], TransferFailed)
    pair.check_empty()


def test_a_thousand_transfers_leave_nothing_behind() -> None:
    pair = Pair(1)
    for number in range(1000):
        transfer = pair.left.offer(layout=EMPTY)
        if number % 10 == 0:
            pair.left.abort(transfer)
        pair.settle()
        assert transfer in pair.left.ended
    pair.check_empty()


def test_a_connection_lost_again_and_again_costs_only_what_was_on_its_way() -> None:
    """Lost after every few frames, in the middle of them, also while lost frames are being sent again."""
    for seed in range(20):
        pair = Pair(2, seed)
        transfers = [pair.left.offer() for _ in range(3)]
        for _ in range(30):
            for _ in range(pair.random.randrange(12)):
                pair.move()
            for side in pair.sides:
                while side.offers:
                    side.take()
                while side.to_decode:
                    side.decode(0)
            pair.lose(pair.random.randrange(2))
        pair.settle()
        for transfer in transfers:
            assert pair.left.ended[transfer] == TransferDelivered(transfer)
            assert pair.right.ended[transfer] == TransferComplete(transfer)
        assert pair.left.core.resent_frames
        pair.check_empty()


def test_a_count_that_cannot_be_ends_the_link() -> None:
    pair = Pair(1)
    pair.left.offer()
    pair.settle()
    core, count = pair.left.core, pair.right.core.received_frames(0)
    core.message(Received(0, 2), 0.0)
    core.message(Received(0, 1), 0.0)  # old news
    for wrong, why in ((count + 1, f"{count} were sent"), (1, "confirmed 2")):
        with pytest.raises(RemoteProtocolError, match=why):
            core.lane_reopened(0, wrong, 0.0)
    with pytest.raises(RemoteProtocolError, match="confirms"):
        core.message(Received(0, count + 1), 0.0)
    with pytest.raises(RemoteProtocolError, match="which the link has not"):
        core.message(Received(1, 0), 0.0)
    core.lane_reopened(0, count, 0.0)
