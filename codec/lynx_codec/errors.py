"""The root of the project's error tree, and the errors a codec raises."""

from __future__ import annotations

__all__ = ["CodecError", "LynxError", "NonFiniteError"]


class LynxError(Exception):
    """Base of every error that lynx_net, lynx_codec and lynx_gpu raise on purpose."""


class CodecError(LynxError):
    """A page cannot be encoded, or bytes are not a valid encoding of the page they claim to be."""


class NonFiniteError(CodecError):
    """The input holds a NaN, an infinity, or a magnitude above the stated limit.

    Attributes:
        token, head, channel: position inside the page, counted from 0.
    """

    def __init__(self, value: float, token: int, head: int, channel: int) -> None:
        super().__init__(f"cannot encode {value!r} at token {token}, head {head}, channel {channel} of the page")
        self.value = value
        self.token = token
        self.head = head
        self.channel = channel
