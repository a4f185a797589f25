"""Which requests to ComfyUI queue a job."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from turnstile.engines.base import Admission

#: The route's names after all that any spelling of it can be reduced to.
_PROMPT = frozenset({"/prompt", "/api/prompt"})
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


def classify(method: bytes, target: bytes) -> Admission:
    """What a request to ComfyUI needs.

    aiohttp decodes percent signs before it routes, so ``/%70rompt`` queues a job as well. More is reduced here
    (doubled and trailing slashes, dots, case, double encoding): ComfyUI answers 405 to those, but something between it
    and us may tidy a path up. A request for the lock that queues nothing does no harm.
    """
    if method.upper() == b"POST" and _reduce(target) in _PROMPT:
        return Admission.LEASE
    return Admission.PASS


def _reduce(target: bytes) -> str:
    match = _AUTHORITY.match(target)
    path = target[match.end() :] if match else target
    path = re.split(rb"[?#]", path, maxsplit=1)[0]
    for _ in range(3):
        path = unquote_to_bytes(path)
    parts: list[str] = []
    for part in path.decode("utf-8", "replace").lower().replace("\\", "/").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)
