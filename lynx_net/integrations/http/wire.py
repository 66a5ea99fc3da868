"""What the two servers say to each other over HTTP: POST /prefill, one for each cache, open until it is delivered.

The request is a JSON object:

    request_id    names the cache; the transfer comes with the same id
    model         the fingerprint of the model that the decode server has
    tokens        the prompt's token ids; the cache is that of all but the last
    deliver_to    a lynx_net address

The answer comes when the cache is there (200, `Delivered`), or as soon as it is clear that it will not come, as an
error in the shape of `errors`. Ending the connection gives the request up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lynx_net.integrations.http.errors import bad_request

__all__ = ["PREFILL_PATH", "PREFILL_QUEUE_S", "PREFILL_S", "CacheWanted", "Delivered"]

PREFILL_PATH = "/prefill"

PREFILL_QUEUE_S = "prefill_queue_s"
"""Key of the offer's metadata: how long the request waited for its turn."""

PREFILL_S = "prefill_s"
"""Key of the offer's metadata: how long the forward pass took."""

MAX_ID_CHARS = 200


@dataclass(frozen=True, slots=True)
class CacheWanted:
    """The request; see above."""

    request_id: str
    model: str
    tokens: tuple[int, ...]
    deliver_to: str

    def to_json(self) -> dict[str, Any]:
        """Its body."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Any) -> CacheWanted:
        """Check a body.

        Raises:
            ApiError: 400.
        """
        match body:
            case {"request_id": str(request_id), "model": str(model), "tokens": list(tokens), "deliver_to": str(url)}:
                if not 0 < len(request_id) <= MAX_ID_CHARS:
                    raise bad_request(f"request_id must have 1 to {MAX_ID_CHARS} characters", "request_id")
                if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
                    raise bad_request("tokens must be token ids, at least one", "tokens")
                return cls(request_id, model, tuple(tokens), url)
        raise bad_request("the body must be an object with request_id, model, tokens and deliver_to")


@dataclass(frozen=True, slots=True)
class Delivered:
    """The answer: what was sent, in payload bytes, and how long each part took."""

    codec: str
    sent_bytes: int
    queue_s: float
    prefill_s: float
    send_s: float

    def to_json(self) -> dict[str, Any]:
        """Its body."""
        return asdict(self)
