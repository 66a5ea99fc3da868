"""What is said to a store, in the `meta` of offers and requests; normative in docs/store.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.errors import LocalProtocolError, LynxError
from lynx_net.store.tokens import MAX_WHOLE_TOKENS, TokenPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from lynx_net.store.format import EntryHead

__all__ = ["FIELD", "NOT_STORED", "Wanted", "is_already_stored", "is_not_stored", "path_from", "stored_as", "wanted"]

FIELD = "store"
"""Key of `meta` under which all of it stands."""

ALREADY_STORED = "already stored"
NOT_STORED = "not stored"


def stored_as(model: str, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> dict[str, Any]:
    """`meta` of a transfer to a store: these are the tokens whose cache it is.

    Args:
        model: a name for the weights; a cache is only ever given to who asks for the same name.
        tokens: as many as the layout has; for a cache without the last token of a prompt, the prompt without it.

    Raises:
        LocalProtocolError: no tokens, or numbers that are no token ids.
    """
    return {FIELD: _path_fields(TokenPath.of(model, tokens))}


def wanted(
    model: str,
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    *,
    codec: str | None = None,
    least_tokens: int = 1,
) -> dict[str, Any]:
    """`meta` of a request to a store: the longest stored prefix of these tokens is wanted.

    Args:
        model, tokens: as in `stored_as`. Leave the last token of a prompt out: it has to be fed to the model anyway.
        codec: only caches of this codec ("plan" for those of a `CodecPlan`); None: any.
        least_tokens: a shorter prefix is not worth it, the request is refused.

    Raises:
        LocalProtocolError: no tokens, or numbers that are no token ids.
    """
    fields = _path_fields(TokenPath.of(model, tokens)) | {"least_tokens": least_tokens}
    return {FIELD: fields if codec is None else fields | {"codec": codec}}


def is_already_stored(error: LynxError) -> bool:
    """Whether a transfer to a store failed because the store has this cache already."""
    return ALREADY_STORED in str(error) or "already being stored" in str(error)


def is_not_stored(error: LynxError) -> bool:
    """Whether a request to a store was refused because it has no prefix that is long enough."""
    return NOT_STORED in str(error)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, checked.

    Attributes:
        path: the prompt; None if an entry was asked for by its key.
        key: of the entry.
        codec: that it must have, or None.
        least_tokens: that it must have.
    """

    path: TokenPath | None
    key: str | None
    codec: str | None
    least_tokens: int

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Wanted:
        """Read what a peer asks for; raises LocalProtocolError where it makes no sense."""
        fields = meta.get(FIELD)
        if not isinstance(fields, dict):
            raise LocalProtocolError(f"a request to a store says in meta[{FIELD!r}] what it wants")
        codec, least, key = fields.get("codec"), fields.get("least_tokens", 1), fields.get("key")
        if not isinstance(codec, str | None) or type(least) is not int or not isinstance(key, str | None):
            raise LocalProtocolError("codec and key are strings, least_tokens is an integer")
        return cls(None if key is not None else path_from(fields), key, codec, least)

    def fits(self, head: EntryHead) -> bool:
        """Whether an entry is of the codec."""
        return self.codec in (None, head.codec)


def path_from(fields: dict[str, Any]) -> TokenPath:
    """The tokens that a peer names; raises LocalProtocolError where they make no sense."""
    match fields:
        case {"model": str(model), "tokens": bytes(tokens)}:
            return TokenPath.of_bytes(model, tokens)
        case {"model": str(model), "count": int(count), "chain": bytes(chain), "tail": bytes(tail)}:
            return TokenPath(model, count, chain, tail)
    raise LocalProtocolError("tokens for a store are a model and either tokens or count, chain and tail")


def _path_fields(path: TokenPath) -> dict[str, Any]:
    if path.count <= MAX_WHOLE_TOKENS:
        return {"model": path.model, "tokens": path.tail}
    short = path.short()
    return {"model": path.model, "count": path.count, "chain": path.chain, "tail": short.tail}
