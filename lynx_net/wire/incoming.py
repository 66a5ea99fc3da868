"""The transfers that one side of a link receives: their offers, the places of their segments, what they are granted.

States of a transfer here:  PENDING -> ACCEPTED -> COMPLETE,  and from the first two -> FAILED
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lynx_net.errors import IntegrityError, LocalProtocolError, LynxError, RemoteProtocolError, TransferAbortedError
from lynx_net.wire.events import Event, OfferReceived, TransferFailed
from lynx_net.wire.frames import MIN_SEGMENT_BYTES, SegmentHeader
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.messages import MAX_STREAMS, AbortCode, Accept, Complete, Credit, OfferMessage, abort_message
from lynx_net.wire.receiving import ReceiveState

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from lynx_net.wire.config import LinkConfig
    from lynx_net.wire.grants import CreditBook, Grant
    from lynx_net.wire.lending import Lender, LentRun
    from lynx_net.wire.liveness import Liveness
    from lynx_net.wire.pagesizes import PageSizes
    from lynx_net.wire.pool import BufferPool
    from lynx_net.wire.scheduler import Scheduler
    from lynx_net.wire.stats import TransferStats

__all__ = ["Arrived", "Incoming", "SegmentAwaitsOffer"]

Arrived: TypeAlias = "tuple[SegmentHeader, int]"
"""A whole segment that lies in its place, and the checksum that its bytes have."""


class SegmentAwaitsOffer(Exception):
    """A segment overtook its offer on another lane: read on from this lane when the offer is there."""


class Incoming:
    """The receiving half of a `LinkCore`, whose parts it shares.

    Args:
        link: key of this link in the credit book.
        lanes: how many the link has.
        initiator: True at the side that connected.
        book: the credit book shared by all links of the process.
        route_grant: called with every grant the book makes, which may be for another link; it
            calls `apply_grant` of the link that the grant names.
    """

    def __init__(
        self,
        *,
        link: Hashable,
        lanes: int,
        initiator: bool,
        config: LinkConfig,
        scheduler: Scheduler,
        liveness: Liveness,
        book: CreditBook,
        route_grant: Callable[[Grant], None],
    ) -> None:
        self.lender: Lender | None = None
        """Lends buffers to lanes that can receive into them."""
        self._link = link
        self._config = config
        self._anchor_window_bytes = config.anchor_window_bytes * max(lanes // 2, 1)
        self._scheduler = scheduler
        self._liveness = liveness
        self._book = book
        self._route_grant = route_grant
        self._peer_parity = 0 if initiator else 1
        self._highest_offer = 0
        self._pending: set[int] = set()
        self._states: dict[int, ReceiveState] = {}
        liveness.decoder_moved(book.decoded_pages, liveness.heard_at_s)

    # ---- for the application

    def take(
        self,
        offer: OfferMessage,
        layout: CacheLayout,
        sizes: Callable[[int], Sequence[PageSizes]],
        need_bytes: int,
        now: float,
        stats: TransferStats | None = None,
        *,
        exact: bool = False,
        pool: BufferPool | None = None,
    ) -> list[Event]:
        """Accept an offer as soon as its memory can be reserved; nothing happens if the transfer has ended.

        `sizes` gives the byte sizes each stream of a page may have, `need_bytes` the most the whole transfer can take;
        what arrives is counted in `stats`; `exact` says that the last of several streams is exact; buffers come from
        `pool`, by default the one that all transfers of the process share.
        """
        if not self._book.fits(need_bytes):
            reason = f"the transfer needs {need_bytes} bytes, this receiver holds at most {self._book.memory_bytes}"
            return self.abort(offer.transfer, AbortCode.TOO_LARGE, reason)
        if offer.transfer not in self._pending:
            return []
        config = self._config
        windows = [self._anchor_window_bytes] + [config.residual_window_bytes] * (offer.streams - 1)
        state = ReceiveState(
            offer.transfer,
            layout,
            offer.streams,
            offer.segment_bytes,
            sizes,
            windows,
            config.initial_credit_bytes,
            self._book.pool if pool is None else pool,
            early_window=config.early_residual_bytes,
            stats=stats,
            exact=exact,
        )
        self._states[offer.transfer] = state
        self._pending.discard(offer.transfer)
        self._liveness.receiving[offer.transfer] = now
        events: list[Event] = list(state.start())
        if state.complete:
            self._scheduler.control(Accept(offer.transfer))
            self._finish(offer.transfer)
            return events
        self._send_grants(self._book.add(self._link, state, need_bytes))
        if not state.accepted:
            early_bytes = min(state.early_bytes(), need_bytes)
            if not self._book.reserve_early(self._link, offer.transfer, early_bytes):
                return self.abort(offer.transfer, AbortCode.OVERLOADED, "too many transfers wait at this receiver")
        return events

    def transfers(self) -> list[int]:
        """Ids of those that have not ended."""
        return [*self._states, *self._pending]

    def state(self, transfer: int) -> ReceiveState | None:
        """State of a transfer that was taken and has not ended."""
        return self._states.get(transfer)

    def decoded(self, transfer: int, pages: Sequence[int], stream: int) -> list[Event]:
        """Pages are in place with streams 0 to `stream`; ignored if the transfer has ended meanwhile."""
        state = self._states.get(transfer)
        if state is None:
            return []
        events: list[Event] = [*state.all_decoded(pages, stream)]
        self._book.decoded_pages += len(pages)
        if grants := self._book.progressed(self._link, transfer, stream_finished=False):
            self._send_grants(grants)
        if state.complete:
            self._finish(transfer)
        return events

    # ---- for the lanes

    def place(self, header: SegmentHeader, now: float) -> memoryview | None:
        """Where a segment's payload goes; None drops it (it came before, or its transfer has ended).

        Raises:
            SegmentAwaitsOffer: the offer is still on its way on another lane, or is being decided on.
            RemoteProtocolError: the segment breaks a rule.
        """
        state = self._states.get(header.transfer)
        if state is not None:
            view = state.place(header)
            if self.lender is not None:
                self.lender.segment_placed(state, header.stream)
            if state.stats.first_segment_s is None:
                state.stats.first_segment_s = now
            self._liveness.heard_segment(header.transfer, header.stream, now)
            return view
        if header.transfer % 2 != self._peer_parity:
            raise RemoteProtocolError(f"a segment of transfer {header.transfer}, which is not the peer's to send")
        if header.transfer > self._highest_offer or header.transfer in self._pending:
            raise SegmentAwaitsOffer
        return None

    def segment(self, header: SegmentHeader, payload_sum: int, now: float) -> list[Event]:
        """All bytes of a segment are in the place that `place` gave; `payload_sum` is the checksum they have."""
        events: list[Event] = []
        self.segments([(header, payload_sum)], now, events)
        return events

    def segments(self, arrived: Sequence[Arrived], now: float, events: list[Event]) -> None:
        """The same for several, in order; what is due is granted once for all of them. Adds to `events`."""
        finished: dict[int, bool] = {}
        for header, payload_sum in arrived:
            state = self._states.get(header.transfer)
            if state is None:
                continue
            self._liveness.heard_segment(header.transfer, header.stream, now)
            owed = state.owes(header.stream)
            try:
                events += state.segment_arrived(header, payload_sum)
            except IntegrityError as error:
                events += self.abort(header.transfer, AbortCode.INTEGRITY, str(error), error)
                continue
            self._came(state, header.stream, owed, now, finished)
        self._progressed(finished)

    def runs(self, runs: Sequence[LentRun], now: float, events: list[Event]) -> None:
        """The same for segments in lent buffers, which have not been placed.

        Raises:
            RemoteProtocolError: one of them breaks a rule. What came before it counts.
        """
        finished: dict[int, bool] = {}
        try:
            for run in runs:
                transfer, stream = run[:2]
                state = self._states.get(transfer)
                if state is None:
                    continue
                self._liveness.heard_segment(transfer, stream, now)
                if state.stats.first_segment_s is None:
                    state.stats.first_segment_s = now
                owed = state.owes(stream)
                try:
                    state.take_run(run, events)
                except IntegrityError as error:
                    events += self.abort(transfer, AbortCode.INTEGRITY, str(error), error)
                    continue
                self._came(state, stream, owed, now, finished)
        finally:
            self._progressed(finished)

    def _came(self, state: ReceiveState, stream: int, owed: bool, now: float, finished: dict[int, bool]) -> None:
        """Segments of a stream came that was owed before, or not; notes whether a whole stream is in."""
        if owed and not state.owes(stream):
            state.stats.last_segment_s = now
            finished[state.transfer] = True
        else:
            finished.setdefault(state.transfer, False)

    def _progressed(self, finished: dict[int, bool]) -> None:
        for transfer, stream_finished in finished.items():
            if grants := self._book.progressed(self._link, transfer, stream_finished=stream_finished):
                self._send_grants(grants)

    def lend(self, streams: Iterable[tuple[int, int]]) -> None:
        """Lend buffers for what may follow on segments of these transfers and streams.

        Last, when those of decoded pages are free again.
        """
        if self.lender is None:
            return
        for transfer, stream in streams:
            if (state := self._states.get(transfer)) is not None:
                self.lender.lend(state, stream)

    def not_filled(self, lent: Sequence[tuple[int, int, memoryview]]) -> None:
        """A connection is gone, and with it what was to come into these buffers, each of a stream of a transfer."""
        for transfer, stream, buffer in lent:
            if (state := self._states.get(transfer)) is not None:
                state.take_back(stream, [buffer])

    def lost(self, unfinished: Sequence[SegmentHeader]) -> None:
        """A connection is gone, and with it the rest of these segments, which had been placed."""
        for header in unfinished:
            if (state := self._states.get(header.transfer)) is not None:
                state.lost(header)

    # ---- for the link: what the peer says, grants, and ends

    def offered(self, offer: OfferMessage) -> list[Event]:
        """The peer offers a transfer."""
        if offer.transfer % 2 != self._peer_parity or offer.transfer <= self._highest_offer:
            raise RemoteProtocolError(f"offer with the transfer id {offer.transfer}, which cannot be the next one")
        self._scheduler.check_backlog()
        self._highest_offer = offer.transfer
        self._pending.add(offer.transfer)
        try:
            layout = CacheLayout.from_wire(offer.layout)
        except LocalProtocolError as error:
            return self.abort(offer.transfer, AbortCode.MISUSE, str(error))
        largest = self._config.segment_bytes
        if not 1 <= offer.streams <= MAX_STREAMS or not MIN_SEGMENT_BYTES <= offer.segment_bytes <= largest:
            reason = f"streams must be 1 to {MAX_STREAMS}, segment_bytes {MIN_SEGMENT_BYTES} to {largest}"
            return self.abort(offer.transfer, AbortCode.MISUSE, reason)
        if len(self._pending) + len(self._states) > self._config.max_pending_offers:
            return self.abort(offer.transfer, AbortCode.OVERLOADED, "too many transfers are open on this link")
        return [OfferReceived(offer, layout)]

    def abort(self, transfer: int, code: int, reason: str, error: LynxError | None = None) -> list[Event]:
        """Give up a transfer and tell the peer; nothing happens if it has ended."""
        if not self.close(transfer):
            return []
        self._scheduler.control(abort_message(transfer, code, reason))
        return [TransferFailed(transfer, error if error is not None else TransferAbortedError(reason))]

    def close(self, transfer: int) -> bool:
        """A transfer is over, and its claims are taken out of the credit book; False if it is none of these."""
        was_pending = transfer in self._pending
        self._pending.discard(transfer)
        self._liveness.receiving.pop(transfer, None)
        state = self._states.pop(transfer, None)
        if state is not None:
            if self.lender is not None:
                self.lender.end(state)
            state.release()
            self._send_grants(self._book.remove(self._link, transfer))
        return was_pending or state is not None

    def _finish(self, transfer: int) -> None:
        self.close(transfer)
        self._scheduler.control(Complete(transfer))

    def _send_grants(self, grants: list[Grant]) -> None:
        for grant in grants:
            self._route_grant(grant)

    def apply_grant(self, grant: Grant) -> None:
        """Tell the peer of a grant that the book made for this link."""
        if grant.stream < 0:
            if not self._states[grant.transfer].covered:  # or Complete says so
                self._scheduler.control(Accept(grant.transfer))
        else:
            self._scheduler.control(Credit(grant.transfer, grant.stream, grant.limit))

    def reassure(self, now: float) -> None:
        """Rule 4 of liveness.py. Nothing is said while the peer does not even read what was said before."""
        decoder_moves = self._liveness.decoder_moved(self._book.decoded_pages, now)
        if self._scheduler.has_control():
            return
        for transfer, state in self._states.items():
            decoding = decoder_moves and any(window.held for window in state.windows)
            if decoding or self._book.withholds(self._link, transfer):
                self._scheduler.control(Credit(transfer, 0, state.windows[0].limit))

    def stalled(self, now: float) -> list[tuple[int, str]]:
        """Transfers that could have moved and did not, and what did not happen (rule 3 of liveness.py)."""
        return self._liveness.stalled_incoming(
            now, self._states, lambda class_: self._book.is_behind(self._link, class_)
        )
