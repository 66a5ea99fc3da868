"""Both sides of a lane show that they have the same key, without saying it.

Each side puts a fresh nonce into its Hello. The connecting side then sends a Proof, and the serving side, once it has
checked that, its own. A proof is HMAC-SHA256 (RFC 2104) with the shared key over

    label of the prover's role | length of the connecting Hello | that Hello | length of the serving Hello | that Hello

with the Hellos as they travelled, byte by byte, and lengths of 4 bytes, little-endian. So:

1. A recorded proof fits no other lane, since each side has put 32 bytes of its own choice under it.
2. A proof sent back to its maker does not fit, since the roles have labels of their own.
3. Nobody between the sides can change a field of either Hello, the key's absence included.
4. The serving side proves nothing to a peer that has proved nothing, so that only who has the key, or is connected
   to, gets anything a weak key could be guessed from.
"""

from __future__ import annotations

import hashlib
import hmac

from lynx_net.errors import LocalProtocolError

__all__ = ["CONNECTING", "MIN_KEY_BYTES", "NONCE_BYTES", "SERVING", "check_key", "prove", "proves"]

NONCE_BYTES = 32
MIN_KEY_BYTES = 16

CONNECTING = b"lynx_net connecting "
SERVING = b"lynx_net serving    "
"""Labels of the roles; of equal length, so that what follows them begins at the same place."""


def check_key(key: bytes | None) -> bytes | None:
    """The key as given; raises LocalProtocolError if it is no bytes or too short to be one."""
    if key is None:
        return None
    if not isinstance(key, bytes):
        raise LocalProtocolError(f"a shared key must be bytes, not {type(key).__name__}")
    if len(key) < MIN_KEY_BYTES:
        raise LocalProtocolError(f"a shared key must have at least {MIN_KEY_BYTES} bytes, not {len(key)}")
    return key


def prove(key: bytes, role: bytes, connecting_hello: bytes, serving_hello: bytes) -> bytes:
    """The proof of one role: 32 bytes.

    Args:
        key: shared by both sides.
        role: CONNECTING or SERVING.
        connecting_hello, serving_hello: the payloads of the two Hello frames of this lane.
    """
    code = hmac.new(key, role, hashlib.sha256)
    for hello in (connecting_hello, serving_hello):
        code.update(len(hello).to_bytes(4, "little"))
        code.update(hello)
    return code.digest()


def proves(mac: bytes, key: bytes, role: bytes, connecting_hello: bytes, serving_hello: bytes) -> bool:
    """Whether a received proof is right; takes a time that does not depend on where it is wrong."""
    return hmac.compare_digest(mac, prove(key, role, connecting_hello, serving_hello))
