"""The shapes of llama-server's answers: errors, models, completions in its own and OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

from .exchange import HttpError
from .httplib import JSON_UTF8, compact
from .ollama_formats import OpenAiChat, OpenAiText, sse, text_of, usage

BUILD = "b11434-1f30ac0ce"
CODES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "not_found_error": 404,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
}


def llama_error(message: str, kind: str = "invalid_request_error") -> HttpError:
    """An error as llama-server answers it."""
    code = CODES[kind]
    shape = {"error": {"code": code, "message": message, "type": kind}}
    return HttpError(code, compact(shape), JSON_UTF8)


def parse(body: bytes) -> dict[str, Any]:
    """A request's JSON object; names count as they are spelled."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        text = f"[json.exception.parse_error.101] parse error at {where}: {error.msg}"
        raise llama_error(text) from None
    except UnicodeDecodeError:
        raise llama_error("[json.exception.parse_error.101] parse error: invalid UTF-8") from None
    return value if isinstance(value, dict) else {}


def count_tokens(asked: dict[str, Any], default: int) -> int:
    """How long the answer is to be."""
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
        wanted = asked.get(key)
        if isinstance(wanted, int) and wanted >= 0:
            return wanted
    return default


def timings(tokens: int) -> dict[str, Any]:
    """What every final answer says about its speed."""
    return {"prompt_n": 1, "prompt_ms": 10.0, "predicted_n": tokens, "predicted_ms": 100.0}


class LlamaChat(OpenAiChat):
    """/v1/chat/completions."""

    fingerprint = BUILD

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": None}
        return sse(self._shape({"delta": delta, "finish_reason": None}, True))

    def piece(self, index: int, text: str) -> bytes:
        return sse(self._shape({"delta": {"content": text}, "finish_reason": None}, True))

    def closing(self, tokens: int) -> bytes:
        last = self._shape({"delta": {}, "finish_reason": "stop"}, True)
        return sse({**last, "timings": timings(tokens)}) + b"data: [DONE]\n\n"

    def whole(self, tokens: int) -> dict[str, Any]:
        return {**super().whole(tokens), "timings": timings(tokens)}


class LlamaText(OpenAiText):
    """/v1/completions."""

    fingerprint = BUILD


class Completion(OpenAiText):
    """/completion, llama.cpp's own."""

    def _own(self, text: str, stop: bool, tokens: int) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": 0,
            "stop": stop,
            "tokens_predicted": tokens,
            "tokens_evaluated": 1,
        }

    def piece(self, index: int, text: str) -> bytes:
        return sse(self._own(text, False, index + 1))

    def closing(self, tokens: int) -> bytes:
        return sse({**self._end(tokens), "content": ""})

    def whole(self, tokens: int) -> dict[str, Any]:
        return self._end(tokens)

    def _end(self, tokens: int) -> dict[str, Any]:
        shape = self._own(text_of(tokens), True, tokens)
        more = {"model": self.model, "stop_type": "limit", "truncated": False}
        return {**shape, **more, "timings": timings(tokens), "prompt": "", "stopping_word": ""}


def embeddings(model: str, count: int) -> dict[str, Any]:
    """/v1/embeddings."""
    data = [
        {"embedding": [0.01, -0.02, 0.03, 0.04], "index": index, "object": "embedding"}
        for index in range(count)
    ]
    return {"model": model, "object": "list", "usage": usage(0), "data": data}


def props(alias: str, slots: int, sleeping: bool) -> dict[str, Any]:
    """What a server with a model answers on /props."""
    return {
        "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": 4096},
        "total_slots": slots,
        "model_alias": alias,
        "model_ftype": "Q4_K - Medium",
        "model_path": f"/models/{alias}.gguf",
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": "{{ messages }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": BUILD,
        "is_sleeping": sleeping,
    }


ROUTER_PROPS = {
    "role": "router",
    "models_autoload": True,
    "model_alias": "llama-server",
    "model_path": "none",
    "default_generation_settings": {"params": {}, "n_ctx": 0},
    "build_info": BUILD,
}

METRICS = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1
"""
