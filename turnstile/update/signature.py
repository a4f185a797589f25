"""Whether a release is its publisher's: an Ed25519 signature over the wheel's bytes."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from turnstile.update.release import NotUsable

#: Bytes of a signature.
LENGTH = 64


def load_keys(texts: Iterable[str]) -> tuple[Ed25519PublicKey, ...]:
    """The keys of PEM texts; raises ValueError for one that is no Ed25519 public key."""
    keys = []
    for text in texts:
        try:
            key = load_pem_public_key(text.encode())
        except (ValueError, UnsupportedAlgorithm):
            raise ValueError("a public key for updates can't be read") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("a public key for updates is not of the kind Ed25519")
        keys.append(key)
    return tuple(keys)


def check_signature(data: bytes, signature: bytes, keys: Iterable[Ed25519PublicKey]) -> None:
    """Raises `NotUsable` unless one of ``keys`` made ``signature`` for exactly these bytes."""
    if len(signature) != LENGTH:
        raise NotUsable(f"its signature has {len(signature)} bytes instead of {LENGTH}")
    for key in keys:
        try:
            key.verify(signature, data)
        except InvalidSignature:
            continue
        return
    raise NotUsable(
        "its signature is not its publisher's: it was changed, or somebody else made it"
    )


_CHECKSUM = re.compile(r"\s*([0-9A-Fa-f]{64})(?:\s|\Z)")


def check_checksum(data: bytes, text: bytes) -> None:
    """Raises `NotUsable` unless ``text``, as sha256sum writes it, fits; it tells damage from malice, no more."""
    match = _CHECKSUM.match(text.decode("ascii", "replace"))
    if match is None:
        raise NotUsable("its .sha256 file holds no checksum")
    if not hmac.compare_digest(match[1].lower(), hashlib.sha256(data).hexdigest()):
        raise NotUsable("its checksum is not the file's: the download is damaged")
