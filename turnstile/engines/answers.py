"""Bodies of answers that were kept on their way to a client."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_CODINGS = {b"gzip": 47, b"x-gzip": 47, b"deflate": zlib.MAX_WBITS}


def decode_body(
    headers: Iterable[tuple[bytes, bytes]], body: bytes, complete: bool, limit: int
) -> tuple[bytes, bool] | None:
    """The body without its content coding, and whether that is all of it; ``None`` if it can't be read.

    :param body: as much of it as was kept, without transfer coding.
    :param complete: whether that is all of it.
    :param limit: the most bytes that are decoded.
    """
    coding = b",".join(v for k, v in headers if k.lower() == b"content-encoding").strip().lower()
    if not coding or coding == b"identity":
        return body, complete
    wbits = _CODINGS.get(coding)
    if wbits is None:
        return None
    for bits in (wbits, -zlib.MAX_WBITS) if coding == b"deflate" else (wbits,):
        decoder = zlib.decompressobj(bits)
        try:
            data = decoder.decompress(body, limit)
        except zlib.error:
            continue
        return data, complete and decoder.eof
    return None
