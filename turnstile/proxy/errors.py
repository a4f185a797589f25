"""turnstile's own answers: JSON that the clients of the engines can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

#: OpenAI's error types by status; others are "server_error" or "invalid_request_error".
_OPENAI_TYPES = {429: "rate_limit_error", 503: "service_unavailable"}


def error_body(
    status: int, message: str, target: bytes, details: Mapping[str, Any] | None = None
) -> bytes:
    """The body of an error: Ollama's ``{"error": "text"}``, on ``/v1/`` paths OpenAI's error object.

    :param details: further members of the JSON object.
    """
    if target.lstrip(b"/").startswith(b"v1/"):
        kind = _OPENAI_TYPES.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        error: object = {"message": message, "type": kind, "param": None, "code": None}
    else:
        error = message
    return json.dumps({"error": error, **(details or {})}).encode()


def reason_phrase(status: int) -> bytes:
    """The reason phrase of a status line of our own."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Error" if status >= 400 else b"OK"


def error_response(
    status: int,
    message: str,
    target: bytes,
    *,
    keep_alive: bool,
    retry_after: int | None = None,
    head_only: bool = False,
    allow: bytes | None = None,
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """A whole error response, head and body.

    :param retry_after: seconds for Retry-After.
    :param head_only: leave the body out (the answer to HEAD).
    :param allow: the methods that there are (the answer 405).
    :param details: further members of the JSON object.
    """
    body = error_body(status, message, target, details)
    lines = [
        b"HTTP/1.1 %d %s" % (status, reason_phrase(status)),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    ]
    if retry_after is not None:
        lines.append(b"Retry-After: %d" % retry_after)
    if allow is not None:
        lines.append(b"Allow: " + allow)
    if not keep_alive:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head_only else body)
