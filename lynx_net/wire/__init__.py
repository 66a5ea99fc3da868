"""The protocol as pure code: bytes and decisions, no sockets, no clock, no event loop."""
