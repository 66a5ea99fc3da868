"""lynx_net moves a KV cache so that decoding starts on half of its bits and is verified when the rest is in."""

from lynx_net.aio.link import Link
from lynx_net.aio.readiness import Readiness
from lynx_net.aio.requests import IncomingRequest
from lynx_net.aio.timeline import Observer, Timeline
from lynx_net.aio.transfer import IncomingTransfer, Offer
from lynx_net.errors import LynxError
from lynx_net.serdes.deserializer import ReceivedTransfer
from lynx_net.serdes.device import DeviceBuffers
from lynx_net.serdes.fine import fine_tokens
from lynx_net.serdes.links import KVLink, KVRequest, KVServer, connect, serve
from lynx_net.serdes.serializer import Sending
from lynx_net.serdes.target import DeviceCache, HostCache, KVTarget
from lynx_net.transport import TlsConfig
from lynx_net.transport.options import Keepalive, PerClass, SocketOptions
from lynx_net.wire.config import LinkConfig
from lynx_net.wire.layout import CacheLayout
from lynx_net.wire.stats import LaneStats, TransferStats

__version__ = "0.1.0"

__all__ = [
    "CacheLayout",
    "DeviceBuffers",
    "DeviceCache",
    "HostCache",
    "IncomingRequest",
    "IncomingTransfer",
    "KVLink",
    "KVRequest",
    "KVServer",
    "KVTarget",
    "Keepalive",
    "LaneStats",
    "Link",
    "LinkConfig",
    "LynxError",
    "Observer",
    "Offer",
    "PerClass",
    "Readiness",
    "ReceivedTransfer",
    "Sending",
    "SocketOptions",
    "Timeline",
    "TlsConfig",
    "TransferStats",
    "__version__",
    "connect",
    "fine_tokens",
    "serve",
]
