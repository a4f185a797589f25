"""The shapes of Ollama's answers: its own API, OpenAI's and Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .exchange import HttpError

JSON = b"application/json; charset=utf-8"
WORDS = ("the", "card", "has", "one", "tenant", "at", "a", "time")
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")

Piece = Callable[[int, str], bytes]
"""Formats one token: its index and text."""


def stamp(seconds: float) -> str:
    """A time as Go prints it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def word(index: int) -> str:
    """The token at an index of any answer."""
    text = WORDS[index % len(WORDS)]
    return text if index == 0 else f" {text}"


def text_of(tokens: int) -> str:
    """A whole answer of so many tokens."""
    return "".join(word(index) for index in range(tokens))


def compact(value: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, separators=(",", ":")).encode()


def fields(data: bytes) -> dict[str, Any]:
    """A JSON object as Go reads it: names in any case, the last of repeated ones."""
    if not data.strip():
        raise failure(400, "missing request body")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise failure(400, str(error)) from None
    if not isinstance(value, dict):
        raise failure(400, "json: cannot unmarshal value into Go value of type api.Request")
    return {key.lower(): item for key, item in value.items()}


def failure(status: int, text: str) -> HttpError:
    """An error as /api answers it."""
    return HttpError(status, compact({"error": text}), JSON)


def openai_failure(error: HttpError) -> HttpError:
    """The same error as /v1 answers it."""
    try:
        text = json.loads(error.body)["error"]
    except (ValueError, KeyError, TypeError):
        text = error.body.decode("utf-8", "replace")
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    kind = kinds.get(error.status, "api_error")
    shape = {"error": {"message": text, "type": kind, "param": None, "code": None}}
    return HttpError(error.status, compact(shape), JSON)


def parse_keep_alive(value: Any) -> float | None:
    """Seconds; below zero is for ever; None is the server's default."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise failure(400, "invalid type for keep_alive")
    if isinstance(value, (int, float)):
        return float(value) if value >= 0 else -1.0
    if isinstance(value, str):
        return parse_duration(value)
    raise failure(400, "invalid type for keep_alive")


def parse_duration(text: str) -> float:
    """A Go duration in seconds."""
    sign, rest = (-1.0, text[1:]) if text[:1] == "-" else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    total, end = 0.0, 0
    for found in DURATION.finditer(rest):
        if found.start() != end:
            break
        total += float(found[1]) * UNITS[found[2]]
        end = found.end()
    if not end or end != len(rest):
        raise failure(400, f'time: invalid duration "{text}"')
    return sign * total


def ndjson(value: Any) -> bytes:
    """A line of an NDJSON stream."""
    return compact(value) + b"\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """An event of an SSE stream."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + compact(value) + b"\n\n"


class Format:
    """One API's answers.  ``stream_type`` is the content type of its streams."""

    stream_type = b"application/x-ndjson"
    streams_by_default = False

    def __init__(self, model: str, now: float, serial: int) -> None:
        self.model = model
        self.now = now
        self.serial = serial

    def opening(self) -> bytes:
        return b""

    def piece(self, index: int, text: str) -> bytes:
        raise NotImplementedError

    def closing(self, tokens: int) -> bytes:
        raise NotImplementedError

    def whole(self, tokens: int) -> dict[str, Any]:
        raise NotImplementedError


class Native(Format):
    """/api/generate."""

    streams_by_default = True
    chat = False

    def _part(self, text: str) -> dict[str, Any]:
        if self.chat:
            return {"message": {"role": "assistant", "content": text}}
        return {"response": text}

    def _line(self, text: str, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "created_at": stamp(self.now),
            **self._part(text),
            "done": False,
            **more,
        }

    def done(self, reason: str, text: str = "", tokens: int | None = None) -> dict[str, Any]:
        counts = {}
        if tokens is not None:
            counts = {
                "total_duration": 1_000_000,
                "load_duration": 1,
                "prompt_eval_count": 1,
                "prompt_eval_duration": 1,
                "eval_count": tokens,
                "eval_duration": 1,
            }
        return self._line(text, done=True, done_reason=reason, **counts)

    def piece(self, index: int, text: str) -> bytes:
        return ndjson(self._line(text))

    def closing(self, tokens: int) -> bytes:
        return ndjson(self.done("stop", tokens=tokens))

    def whole(self, tokens: int) -> dict[str, Any]:
        return self.done("stop", text_of(tokens), tokens)


class NativeChat(Native):
    """/api/chat."""

    chat = True


class OpenAiChat(Format):
    """/v1/chat/completions."""

    stream_type = b"text/event-stream"
    kind = "chat.completion"
    fingerprint = "fp_ollama"

    def _shape(self, choice: dict[str, Any], chunk: bool) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.serial}",
            "object": self.kind + (".chunk" if chunk and self.kind == "chat.completion" else ""),
            "created": int(self.now),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [{"index": 0, **choice}],
        }

    def piece(self, index: int, text: str) -> bytes:
        delta = {"role": "assistant", "content": text}
        return sse(self._shape({"delta": delta, "finish_reason": None}, True))

    def closing(self, tokens: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        last = self._shape({"delta": delta, "finish_reason": "stop"}, True)
        return sse(last) + b"data: [DONE]\n\n"

    def whole(self, tokens: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": text_of(tokens)}
        shape = self._shape({"message": message, "finish_reason": "stop"}, False)
        return {**shape, "usage": usage(tokens)}


class OpenAiText(OpenAiChat):
    """/v1/completions."""

    kind = "text_completion"

    def piece(self, index: int, text: str) -> bytes:
        return sse(self._shape({"text": text, "finish_reason": None}, True))

    def closing(self, tokens: int) -> bytes:
        last = self._shape({"text": "", "finish_reason": "stop"}, True)
        return sse(last) + b"data: [DONE]\n\n"

    def whole(self, tokens: int) -> dict[str, Any]:
        shape = self._shape({"text": text_of(tokens), "finish_reason": "stop"}, False)
        return {**shape, "usage": usage(tokens)}


class Responses(Format):
    """/v1/responses, as much as OpenAI's client needs."""

    stream_type = b"text/event-stream"

    def _shape(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message = {
            "id": f"msg_{self.serial}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
        return {
            "id": f"resp_{self.serial}",
            "object": "response",
            "created_at": int(self.now),
            "status": status,
            "model": self.model,
            "output": [message] if status == "completed" else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
        }

    def opening(self) -> bytes:
        kind = "response.created"
        event = {
            "type": kind,
            "sequence_number": 0,
            "response": self._shape("", "in_progress"),
        }
        return sse(event, kind)

    def piece(self, index: int, text: str) -> bytes:
        kind = "response.output_text.delta"
        event = {
            "type": kind,
            "sequence_number": index + 1,
            "item_id": f"msg_{self.serial}",
            "output_index": 0,
            "content_index": 0,
            "delta": text,
            "logprobs": [],
        }
        return sse(event, kind)

    def closing(self, tokens: int) -> bytes:
        kind = "response.completed"
        event = {
            "type": kind,
            "sequence_number": tokens + 1,
            "response": self.whole(tokens),
        }
        return sse(event, kind)

    def whole(self, tokens: int) -> dict[str, Any]:
        counts = {
            "input_tokens": 1,
            "output_tokens": tokens,
            "total_tokens": tokens + 1,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {**self._shape(text_of(tokens), "completed"), "usage": counts}


class Messages(Format):
    """/v1/messages, in Anthropic's shape."""

    stream_type = b"text/event-stream"

    def _shape(self, content: list[dict[str, Any]], reason: str | None, out: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self.serial}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": out},
        }

    def opening(self) -> bytes:
        start = {"type": "message_start", "message": self._shape([], None, 0)}
        block = {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        }
        return sse(start, "message_start") + sse(block, "content_block_start")

    def piece(self, index: int, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text}
        event = {"type": "content_block_delta", "index": 0, "delta": delta}
        return sse(event, "content_block_delta")

    def closing(self, tokens: int) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": tokens},
        }
        return (
            sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + sse(delta, "message_delta")
            + sse({"type": "message_stop"}, "message_stop")
        )

    def whole(self, tokens: int) -> dict[str, Any]:
        return self._shape([{"type": "text", "text": text_of(tokens)}], "end_turn", tokens)


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's count of tokens."""
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
