"""Tells the service manager, where there is one that asks (systemd's `Type=notify`), how far the server is."""

from __future__ import annotations

import logging
import os
import socket

__all__ = ["notify"]

logger = logging.getLogger("lynx_net.http")


def notify(state: str) -> None:
    """Send a line such as "READY=1" to `$NOTIFY_SOCKET` (sd_notify(3)); nothing happens without one.

    A manager that cannot be reached is a warning in the log: the server works without it.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("cannot tell the service manager %s: %s", state, error)
