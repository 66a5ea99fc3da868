"""TLS 1.3 over any other lane: both sides show certificates, and every byte is encrypted and checked.

The TLS engine is OpenSSL through `ssl.SSLObject`, which reads and writes memory; the lane below moves what it
writes. Payload is encrypted from the encoder's buffer and decrypted into its final one, so that the only copies are
those in and out of OpenSSL's own memory. Sources: RFC 8446 (TLS 1.3), RFC 6125 (names in certificates).

An accepted lane does its handshake in a task of its own, so that a client that hangs there holds up nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from lynx_net.errors import ConnectionLostError, HandshakeError, LocalProtocolError, LynxError
from lynx_net.transport.base import Address, Lane, Listener, SocketOptions, Transport
from lynx_net.transport.tcp import TcpTransport

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["TlsConfig", "TlsLane", "TlsTransport"]

_PIECE_BYTES = 256 * 1024
"""Encrypted at a time: what lies in OpenSSL's memory is beyond recall, and the loop waits for it."""

_READ_BYTES = 128 * 1024
"""Read from the lane below at a time."""

_TLS_RECORD_TYPES = (0x15, 0x16)
"""What a TLS peer begins with: an alert or a handshake record."""

_NO_TLS_HERE = bytes((0x15, 3, 3, 0, 2, 2, 10))
"""A fatal alert (unexpected message), for a peer that began in clear: it says, also to people, that this is TLS."""

_SENTENCES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate, and this side requires one",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate, and this side shows none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority that signed this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refuses this side's certificate, which is expired or not yet valid",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this side's certificate; is it made for this name and purpose?",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it refuses this side's certificate, which is not made for this purpose",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it refuses this side's certificate as revoked",
    "TLSV1_ALERT_DECRYPT_ERROR": "it finds a signature wrong; were bytes changed on their way?",
    "TLSV1_ALERT_ACCESS_DENIED": "it denies this side access",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it speaks no TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS 1.3",
    "SSLV3_ALERT_BAD_RECORD_MAC": "it received bytes that were changed on their way",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "bytes were changed on their way",
    "SSLV3_ALERT_UNEXPECTED_MESSAGE": "it did not expect TLS here, or bytes were changed on their way",
}

_REFUSALS = {reason for reason, sentence in _SENTENCES.items() if "this side" in sentence and "ALERT" in reason}
"""Alerts that are about us and not about bytes that were damaged on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Certificates of one side of a tls:// address. Files are PEM, read when a lane or listener is opened.

    Attributes:
        certificate: this side's certificate, with the chain up to the authority behind it. None shows none, which
            only a connecting side may do, and only a serving side with `require_client_certificate=False` takes.
        private_key: of the certificate; None if it is in the same file.
        private_key_password: of an encrypted private key.
        ca_file: the authorities, one or more, whose certificates are believed. There is no default: every certificate
            that one of them has signed is let in.
        server_name: the name that the server's certificate must bear; None takes the host of the address. For a
            connecting side.
        check_server_name: False believes any certificate of the authorities, whatever name it bears.
        require_client_certificate: False asks clients for no certificate: they then are anybody. For a serving side.
    """

    certificate: str | os.PathLike[str] | None
    ca_file: str | os.PathLike[str]
    private_key: str | os.PathLike[str] | None = None
    private_key_password: str | None = field(default=None, repr=False)
    server_name: str | None = None
    check_server_name: bool = True
    require_client_certificate: bool = True

    def __post_init__(self) -> None:
        if self.certificate is None and self.private_key is not None:
            raise LocalProtocolError("a private_key needs its certificate")
        if self.server_name is not None and not self.check_server_name:
            raise LocalProtocolError("a server_name that is not checked means nothing")

    def client_context(self) -> ssl.SSLContext:
        """OpenSSL's settings for a connecting side; raises LocalProtocolError if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_server_name
        self._set_up(context)
        return context

    def server_context(self) -> ssl.SSLContext:
        """OpenSSL's settings for a serving side; raises LocalProtocolError if a file cannot be used."""
        if self.certificate is None:
            raise LocalProtocolError("a tls:// address cannot be served without a certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # every lane shows its certificates anew
        self._set_up(context)
        if not self.require_client_certificate:
            context.verify_mode = ssl.CERT_NONE
        return context

    def _set_up(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=self.ca_file)
        except OSError as error:
            raise LocalProtocolError(f"cannot use the authorities in {self.ca_file}: {_file_problem(error)}") from error
        if self.certificate is None:
            return
        try:
            # A password is always given: without one OpenSSL would ask at the terminal, and the loop would stand still.
            context.load_cert_chain(self.certificate, self.private_key, self.private_key_password or "")
        except OSError as error:
            where = f"{self.certificate}" + ("" if self.private_key is None else f" with the key in {self.private_key}")
            raise LocalProtocolError(f"cannot use the certificate in {where}: {_file_problem(error)}") from error


class TlsLane(Lane):
    """TLS on another lane, which it owns. The handshake begins at once, in a task; every call waits for it.

    Args:
        inner: the lane that carries the encrypted bytes.
        context: of `TlsConfig`; its side decides ours.
        server_name: what the server's certificate is checked for; None on the serving side.
    """

    def __init__(self, inner: Lane, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self.peer = inner.peer.replace("tcp://", "tls://", 1)
        self._inner = inner
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        serving = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, serving, server_name)
        self._ciphertext = memoryview(bytearray(_READ_BYTES))
        self._sending = False
        self._receiving = False
        self._heard = False
        self._closed = False
        self._error: LynxError | None = None
        self._handshake = asyncio.create_task(self._shake_hands(), name=f"lynx_net TLS handshake with {self.peer}")
        # Whoever uses the lane next gets the error; nobody may come, and that is no fault.
        self._handshake.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def established(self) -> None:
        """Wait for the end of the handshake.

        In TLS 1.3 the connecting side is done before the serving side has seen its certificate; if that is refused,
        its first receive says so.

        Raises:
            HandshakeError: the peer speaks no TLS, shows no certificate that is believed, or believes none of ours.
            ConnectionLostError: the lane was closed.
        """
        if not self._handshake.done():
            await asyncio.wait([self._handshake])
        if self._closed or self._handshake.cancelled():
            raise ConnectionLostError(f"the connection to {self.peer} was closed on this side")
        self._handshake.result()
        if self._error is not None:
            raise self._error

    def joined(self, lanes: int) -> None:
        self._inner.joined(lanes)

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        await self.established()
        # Stays set if this is cancelled or fails: the peer then has part of a record, and no more may follow.
        self._sending = True
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view.nbytes:
                view = view[self._encrypt(view[:_PIECE_BYTES]) :]
                if self._outgoing.pending >= _PIECE_BYTES:
                    await self._flush()
        await self._flush()
        self._sending = False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        await self.established()
        while (count := self._decrypt(views)) is None:
            self._receiving = True
            try:
                got = await self._inner.receive_into([self._ciphertext])
            finally:
                self._receiving = False
            if got == 0:
                raise self._fail(
                    ConnectionLostError(f"connection to {self.peer} lost: it was cut off without TLS's end")
                )
            self._incoming.write(self._ciphertext[:got])
        return count

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._handshake.done():
            self._handshake.cancel()
        elif not self._sending and self._error is None and _succeeded(self._handshake):
            # It would like to hear the peer's end as well, which nobody waits for.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._inner.try_send(self._outgoing.read())
        self._inner.close()

    async def _shake_hands(self) -> None:
        first = True
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError as error:
                self._inner.try_send(self._outgoing.read())  # the alert that tells the peer why
                raise HandshakeError(f"no TLS with {self.peer}: {_sentence(error)}") from error
            else:
                done = True
            try:
                await self._flush()
                if done:
                    return
                got = await self._inner.receive_into([self._ciphertext])
            except ConnectionLostError as error:
                if self._closed:
                    raise
                raise HandshakeError(f"no TLS with {self.peer}: {error}") from error
            if got == 0:
                raise HandshakeError(
                    f"no TLS with {self.peer}: it closed the connection in the middle of the handshake"
                )
            if first and self._ciphertext[0] not in _TLS_RECORD_TYPES:
                self._inner.try_send(_NO_TLS_HERE)
                raise HandshakeError(f"{self.peer} does not speak TLS; both sides must use tls://")
            first = False
            self._incoming.write(self._ciphertext[:got])

    def _encrypt(self, piece: memoryview) -> int:
        try:
            return self._tls.write(piece)
        except ssl.SSLError as error:
            raise self._fail(self._lost(error)) from error

    async def _flush(self) -> None:
        if not self._outgoing.pending:
            return
        try:
            await self._inner.send([self._outgoing.read()])
        except ConnectionLostError:
            await self._hear_why()
            raise

    async def _hear_why(self) -> None:
        """A serving side that refuses our certificate says so and closes, perhaps while we still send: listen."""
        if self._heard or self._receiving or self._closed or not self._handshake.done():
            return
        self._receiving = True
        try:
            got = await self._inner.receive_into([self._ciphertext])
        finally:
            self._receiving = False
        self._incoming.write(self._ciphertext[:got])
        self._decrypt([memoryview(bytearray(1))])

    def _decrypt(self, views: Sequence[memoryview]) -> int | None:
        """Fill the views with what is there, 0 at the peer's end; None if more must be read first."""
        total = 0
        for view in views:
            filled = 0
            while filled < view.nbytes:
                try:
                    # With a buffer it returns how much it has written there.
                    count = cast("int", self._tls.read(view.nbytes - filled, view[filled:]))
                except ssl.SSLWantReadError:
                    return total or None
                except ssl.SSLZeroReturnError:
                    return total
                except ssl.SSLError as error:
                    if not self._sending:
                        self._inner.try_send(self._outgoing.read())  # the alert that tells the peer why
                    raise self._fail(self._lost(error)) from error
                if count == 0:
                    return total
                self._heard = True
                filled += count
                total += count
        return total

    def _lost(self, error: ssl.SSLError) -> LynxError:
        sentence = _sentence(error)
        if not self._heard and error.reason in _REFUSALS:
            return HandshakeError(f"no TLS with {self.peer}: {sentence}")
        return ConnectionLostError(f"connection to {self.peer} lost: {sentence}")

    def _fail(self, error: LynxError) -> LynxError:
        self._error = error
        return error


def _succeeded(handshake: asyncio.Task[None]) -> bool:
    return handshake.done() and not handshake.cancelled() and handshake.exception() is None


def _sentence(error: ssl.SSLError) -> str:
    """What OpenSSL found wrong, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not believed: {error.verify_message}"
    reason = error.reason or str(error)
    return _SENTENCES.get(reason, reason.lower().replace("_", " "))


def _file_problem(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return "no PEM with what is needed, or the password of the private key is wrong"


class TlsListener(Listener):
    """Accepts lanes and begins TLS on each."""

    def __init__(self, inner: Listener, context: ssl.SSLContext) -> None:
        self.url = inner.url.replace("tcp://", "tls://", 1)
        self._inner = inner
        self._context = context

    async def accept(self) -> Lane:
        return TlsLane(await self._inner.accept(), self._context)

    def close(self) -> None:
        self._inner.close()


class TlsTransport(Transport):
    """`tls://host:port`, over TCP."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._tcp = TcpTransport()

    async def connect(self, address: Address, options: SocketOptions) -> Lane:
        """As `Transport.connect`; also raises HandshakeError, and LocalProtocolError for files that cannot be used."""
        config = self._config
        context = config.client_context()
        tcp = await self._tcp.connect(_below(address), options)
        try:
            lane = TlsLane(tcp, context, config.server_name or address.host)
        except ValueError as error:
            tcp.close()
            raise LocalProtocolError(
                f"{config.server_name or address.host!r} is no name of a server: {error}"
            ) from error
        try:
            await lane.established()
        except BaseException:
            lane.close()
            raise
        return lane

    async def listen(self, address: Address, options: SocketOptions) -> Listener:
        """As `Transport.listen`; also raises LocalProtocolError for files that cannot be used."""
        context = self._config.server_context()
        return TlsListener(await self._tcp.listen(_below(address), options), context)


def _below(address: Address) -> Address:
    return Address("tcp", address.host, address.port)
