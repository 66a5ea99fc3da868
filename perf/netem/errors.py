"""What goes wrong when a network is built."""

from __future__ import annotations

from lynx_net.errors import LynxError

__all__ = ["NetemError"]


class NetemError(LynxError):
    """The network cannot be built or has broken: a tool, a privilege or a part of the kernel is missing."""
