"""The error tree. Everything the library raises on purpose is a `LynxError`.

    LynxError
      CodecError                  a page cannot be coded, or its bytes are invalid (from lynx_codec)
      ProtocolError
        LocalProtocolError        this process used the library wrongly; nothing was sent
        RemoteProtocolError       the peer broke the protocol; its link is closed
        HandshakeError            the peers do not fit together or do not trust each other; says what differs
      ConnectionFailedError       no connection could be made, or no address bound
      ConnectionLostError         the connection ended while something was still owed
      PeerTimeoutError            the peer is there but made no progress in the configured time
      FlowControlError            the peer sent more than it was granted
      IntegrityError              a checksum does not match; names transfer, layer and stream
      TransferAbortedError        one side gave the transfer up; carries the reason
      RequestRefusedError         the peer will not serve the request id that was asked for
      StoreError                  a context store cannot do what is asked: its disk fails, is full or is taken
        AlreadyStoredError        the same cache is stored or is being stored
        EntryDamagedError         a stored cache is not what was written; it is never served
      BackendMissingError         an optional part is not installed; names the extra

`asyncio.CancelledError` is never wrapped. Operating system errors are mapped once, in `lynx_net.transport`.
"""

from __future__ import annotations

from lynx_codec.errors import CodecError, LynxError, NonFiniteError

__all__ = [
    "AlreadyStoredError",
    "BackendMissingError",
    "CodecError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "EntryDamagedError",
    "FlowControlError",
    "HandshakeError",
    "IntegrityError",
    "LocalProtocolError",
    "LynxError",
    "NonFiniteError",
    "PeerTimeoutError",
    "ProtocolError",
    "RemoteProtocolError",
    "RequestRefusedError",
    "StoreError",
    "TransferAbortedError",
]


class ProtocolError(LynxError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This process asked for something that the state of the link or transfer does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


class HandshakeError(ProtocolError):
    """The two peers do not fit together (protocol, version, configuration), or one does not trust the other."""


class ConnectionFailedError(LynxError):
    """No connection could be made to the address, or the address could not be bound."""


class ConnectionLostError(LynxError):
    """The connection ended while transfers or requests were open on it."""


class PeerTimeoutError(LynxError):
    """The peer did not close, but made no progress within the configured time."""


class FlowControlError(RemoteProtocolError):
    """The peer sent bytes beyond the credit it was granted."""


class IntegrityError(LynxError):
    """Bytes arrived that do not match their checksum.

    Attributes:
        transfer: transfer id on its link.
        layer, kind: which layer, and "key" or "value".
        stream: index of the stream (0 anchor, then what refines it).
    """

    def __init__(self, transfer: int, layer: int, kind: str, stream: int) -> None:
        super().__init__(f"checksum mismatch in transfer {transfer}, layer {layer} ({kind}), stream {stream}")
        self.transfer = transfer
        self.layer = layer
        self.kind = kind
        self.stream = stream


class TransferAbortedError(LynxError):
    """The transfer was given up by one side; the link lives on."""


class RequestRefusedError(LynxError):
    """The peer answered a request, and the answer is no."""


class StoreError(LynxError):
    """A context store cannot do what is asked of it."""


class AlreadyStoredError(StoreError):
    """The same cache, of the same tokens, model and codec, is stored or is being stored."""


class EntryDamagedError(StoreError):
    """A stored cache is cut off, was changed on its disk, or is of another version."""


class BackendMissingError(LynxError):
    """An optional part of the library needs packages that are not installed.

    Attributes:
        extra: the extra of lynx-net that installs them.
    """

    def __init__(self, what: str, extra: str, hint: str = "") -> None:
        command = f"pip install 'lynx-net[{extra}]'"
        super().__init__(f"{what} is not installed; run: {command}{' and ' + hint if hint else ''}")
        self.extra = extra
