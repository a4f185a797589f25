"""sd-server (stable-diffusion.cpp): which requests make it generate.

Facts from its source (``examples/server``): an image of the OpenAI and the WebUI routes is answered when it is there;
those of its own API (``…_gen``) only begin a job, which ``GET /sdcpp/v1/jobs/ID`` follows.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import unquote_to_bytes

from turnstile.engines.base import Admission

Generation = Literal["sync", "async"]

_WEBUI = frozenset({"/sdapi/v1/txt2img", "/sdapi/v1/img2img"})
_OPENAI = "/v1/images/"
_OWN = "/sdcpp/"
_JOBS = "/sdcpp/v1/jobs/"
_JOB = re.compile(r"/sdcpp/v1/jobs/([^/]+)(/cancel)?")

_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
#: What cpp-httplib takes for an encoded character besides ``%XX``.
_UNICODE = re.compile(rb"%u([0-9A-Fa-f]{4})")


def generation_kind(method: bytes, target: bytes) -> Generation | None:
    """Whether a request generates, and whether its answer comes at the end or at the beginning of that.

    cpp-httplib decodes percent signs before it routes. More is reduced here (case, doubled and trailing slashes,
    dots), and of sd-server's own API every POST counts but those about jobs: routes are added there.
    """
    if method.upper() != b"POST":
        return None
    path = _reduce(target)
    if path in _WEBUI or path.startswith(_OPENAI):
        return "sync"
    if path.startswith(_OWN) and not path.startswith(_JOBS):
        return "async" if path.endswith("_gen") else "sync"
    return None


def classify(method: bytes, target: bytes, is_up: bool) -> Admission:
    """What a request to sd-server needs. Whatever does not generate must not start it.

    :param is_up: whether it runs and listens.
    """
    if generation_kind(method, target) is not None:
        return Admission.LEASE
    return Admission.PASS if is_up else Admission.ABSENT


def cancelled_job(method: bytes, target: bytes) -> str | None:
    """The job that a request wants to cancel."""
    match = _JOB.fullmatch(_reduce(target)) if method.upper() == b"POST" else None
    return match[1] if match and match[2] else None


def _reduce(target: bytes) -> str:
    match = _AUTHORITY.match(target)
    path = target[match.end() :] if match else target
    path = re.split(rb"[?#]", path, maxsplit=1)[0]
    for _ in range(3):
        path = unquote_to_bytes(_UNICODE.sub(_character, path))
    parts: list[str] = []
    for part in path.decode("utf-8", "replace").lower().replace("\\", "/").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def _character(match: re.Match[bytes]) -> bytes:
    return chr(int(match[1], 16)).encode("utf-8", "replace")
