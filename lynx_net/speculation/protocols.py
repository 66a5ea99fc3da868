"""What the decode loop needs from a model and from a transfer. Nothing here imports either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DecodeModel", "OfferView", "ProgressiveTransfer", "Readiness"]


class DecodeModel(Protocol):
    """A causal language model bound to one growing cache. Driven by one thread at a time."""

    @property
    def length(self) -> int:
        """Positions in the cache now."""
        ...

    def forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` (at least one) and return the scores of what follows each: [len(tokens), vocab].

        Blocks; runs in a worker thread. If it raises, the cache must be as before.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget positions at and behind `length`. Cheap, and never called while `forward` runs."""
        ...


class Readiness(Protocol):
    """Something that becomes ready once, or fails with a `LynxError`. Awaitable any number of times."""

    def done(self) -> bool:
        """True once ready, False while it is open; raises the typed error if it has failed."""
        ...

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait until ready; raises the transfer's typed error if that cannot happen any more."""
        ...


class OfferView(Protocol):
    """The part of an offer that the loop reads."""

    @property
    def first_token(self) -> int | None:
        """The first new token, computed exactly by the prefill side, or None."""
        ...


class ProgressiveTransfer(Protocol):
    """The part of a transfer that the loop reads; `lynx_net` transfers have it."""

    @property
    def offer(self) -> OfferView:
        """What the sender announced."""
        ...

    @property
    def anchor_ready(self) -> Readiness:
        """All layers hold values decoded from anchors."""
        ...

    @property
    def residual_ready(self) -> Readiness:
        """All layers hold Q_full."""
        ...

    @property
    def exact_ready(self) -> Readiness:
        """All layers hold the bits of the unquantised cache; a `LocalProtocolError` if that is not sent.

        Asked for only if `decode` verifies on it.
        """
        ...
