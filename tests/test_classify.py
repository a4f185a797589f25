"""What is routed to the card must need a lease; nothing that only unloads may need one."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnstile.engines import comfyui, ollama
from turnstile.engines.base import Admission
from turnstile.engines.ollama import UNLOAD_BODY_LIMIT, is_unload_only

DIGEST = b"/api/blobs/sha256:" + b"0f" * 32


# -- Ollama --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        b"/api/embed",
        b"/api/embeddings",
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/audio/transcriptions",
        b"/v1/some/day",
        b"/api/me",
    ],
)
def test_ollama_lease(path: bytes) -> None:
    assert ollama.classify(b"POST", path) is Admission.LEASE
    assert ollama.classify(b"POST", path + b"?x=/api/show") is Admission.LEASE


@pytest.mark.parametrize("path", [b"/api/generate", b"/api/chat", b"/api/chat?a=b"])
def test_ollama_peek(path: bytes) -> None:
    assert ollama.classify(b"POST", path) is Admission.PEEK


@pytest.mark.parametrize(
    "path",
    [b"/api/" + n for n in b"tags show ps version pull push create copy delete".split()]
    + [b"/v1/models", b"/", b"/api/show?verbose=1", DIGEST, DIGEST.replace(b":", b"%3A")],
)
def test_ollama_pass(path: bytes) -> None:
    assert ollama.classify(b"POST", path) is Admission.PASS


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE"])
@pytest.mark.parametrize("path", [b"/", b"/api/ps", b"/api/chat", b"/v1/models", b"*"])
def test_ollama_methods_that_pass(method: bytes, path: bytes) -> None:
    assert ollama.classify(method, path) is Admission.PASS


@pytest.mark.parametrize("method", [b"PUT", b"PATCH", b"TRACE", b"post", b"BREW"])
def test_ollama_other_methods_take_the_lock(method: bytes) -> None:
    assert ollama.classify(method, b"/api/show") is Admission.LEASE


@pytest.mark.parametrize(
    "target",
    [
        b"/api/generate/",
        b"//api/generate",
        b"/api//chat",
        b"/api/%63hat",
        b"/API/CHAT",
        b"/api/show/../chat",
        b"/api/./chat",
        b"/api%2Fchat",
        b"http://x/api/chat",
        b"http://x/api/show",
        b"/api/show/",
        b"/api/show/../generate",
        b"/api/show#",
        b"/api/blobs/../chat",
        DIGEST + b"/../../chat",
        DIGEST + b"/",
        b"/api/blobs/sha256:",
        b"",
    ],
)
def test_ollama_odd_spellings_take_the_lock(target: bytes) -> None:
    assert ollama.classify(b"POST", target) is Admission.LEASE


@given(st.binary(max_size=60))
def test_ollama_passes_nothing_but_the_known(target: bytes) -> None:
    """Any POST that passes is one of the known routes, byte for byte."""
    if ollama.classify(b"POST", target) is Admission.PASS:
        path = target.split(b"?")[0]
        assert path in ollama._NO_CARD or path.startswith(b"/api/blobs/sha256")


# -- unload-only bodies --------------------------------------------------------------------------------------------

UNLOADS: list[bytes] = [
    b'{"model":"m","keep_alive":0}',
    b'{"model":"m","keep_alive":0.0}',
    b'{"model":"m","keep_alive":"0"}',
    b'{"model":"m","keep_alive":"0s"}',
    b'{"model":"m","keep_alive":"0m"}',
    b'{"model":"m","keep_alive":"0h0m0s"}',
    b' {"model": "m", "prompt": "", "keep_alive": 0, "stream": false} \n',
    b'{"model":"m","messages":[],"keep_alive":0,"options":{"num_ctx":5}}',
]
LOADS: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{}",
    b"{not json",
    b"\xff\xfe",
    b'\xef\xbb\xbf{"model":"m","keep_alive":0}',
    '{"model":"m","keep_alive":0}'.encode("utf-16"),
    b'{"model":"m"}',
    b'{"keep_alive":0}',
    b'{"model":"","keep_alive":0}',
    b'{"model":null,"keep_alive":0}',
    b'{"model":["m"],"keep_alive":0}',
    b'{"model":"m","keep_alive":false}',
    b'{"model":"m","keep_alive":null}',
    b'{"model":"m","keep_alive":1}',
    b'{"model":"m","keep_alive":0.5}',
    b'{"model":"m","keep_alive":-1}',
    b'{"model":"m","keep_alive":NaN}',
    b'{"model":"m","keep_alive":[]}',
    b'{"model":"m","keep_alive":""}',
    b'{"model":"m","keep_alive":"00"}',
    b'{"model":"m","keep_alive":"0s5m"}',
    b'{"model":"m","keep_alive":" 0"}',
    b'{"model":"m","keep_alive":"0x"}',
    '{"model":"m","keep_alive":"\u0660"}'.encode(),
    b'{"model":"m","keep_alive":0,"prompt":"x"}',
    b'{"model":"m","keep_alive":0,"prompt":null}',
    b'{"model":"m","keep_alive":0,"messages":[{}]}',
    b'{"model":"m","keep_alive":0,"messages":""}',
    b'{"model":"m","keep_alive":0,"prompt":[]}',
    b'{"model":"m","keep_alive":0,"prompt":0}',
    b'{"model":"m","keep_alive":0,"Prompt":"x"}',
    b'{"model":"m","keep_alive":0,"images":[]}',
    b'{"model":"m","keep_alive":0,"keep_alive":0}',
    b'{"model":"m","keep_alive":0,"keep_alive":5}',
    b'{"model":"m","keep_alive":0,"Keep_Alive":5}',
    b'{"model":"m","keep_alive":0,"options":{"a":1,"a":2}}',
    b'{"model":"m","keep_alive":0,"options":[]}',
    b'{"model":"m","keep_alive":0,"options":{"a":Infinity}}',
    b'{"model":"m","keep_alive":0,"stream":1}',
    b'{"model":"m","keep_alive":0}{"model":"m"}',
    b'{"model":"m","keep_alive":0}x',
    b'{"model":"m","keep_alive":0,"options":{"a":' + b"[" * 3000,
    b'{"model":"m","keep_alive":0' + b" " * UNLOAD_BODY_LIMIT + b"}",
]


@pytest.mark.parametrize("body", UNLOADS)
def test_unload_only(body: bytes) -> None:
    assert is_unload_only(b"/api/generate", body)
    assert is_unload_only(b"/api/chat?x", body)
    assert not is_unload_only(b"/api/embed", body)
    assert not is_unload_only(b"/api/generate/", body)


@pytest.mark.parametrize("body", LOADS)
def test_not_unload_only(body: bytes) -> None:
    assert not is_unload_only(b"/api/generate", body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, "0", "", "0s", "m"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
keys = st.sampled_from(["model", "keep_alive", "prompt", "messages", "stream", "options", "raw"])


@settings(max_examples=300)
@given(st.dictionaries(keys, json_values))
def test_unload_only_agrees_with_the_rule(data: dict[str, Any]) -> None:
    """A yes means: a model, a zero, and nothing to answer."""
    if is_unload_only(b"/api/chat", json.dumps(data).encode()):
        assert "raw" not in data and isinstance(data["model"], str)
        assert data["keep_alive"] in (0, "0", "0s") and data["keep_alive"] is not False
        assert not data.get("prompt") and not data.get("messages")


@given(st.binary(max_size=200))
def test_unload_only_bears_anything(body: bytes) -> None:
    assert not is_unload_only(b"/api/generate", body) or b"model" in body


# -- ComfyUI -------------------------------------------------------------------------------------------------------


def comfy_app() -> web.Application:
    """Routes as ComfyUI makes them: each twice, with and without /api."""
    app = web.Application()
    routes = web.RouteTableDef()

    async def prompt(request: web.Request) -> web.Response:
        return web.Response()

    async def other(request: web.Request) -> web.Response:
        return web.Response()

    for prefix in ("", "/api"):
        routes.get(prefix + "/prompt")(other)
        routes.post(prefix + "/prompt")(prompt)
        for path in ("/queue", "/interrupt", "/free", "/upload/image", "/history"):
            routes.post(prefix + path)(other)
        routes.post(prefix + "/userdata/{file}")(other)
        routes.get(prefix + "/history/{prompt_id}")(other)
    app.add_routes(routes)
    app["prompt"] = prompt
    return app


APP = comfy_app()


def routed_to_prompt(method: str, target: str) -> bool:
    """Ask aiohttp itself: its parser, its router. A target that it refuses reaches nobody."""
    parser = HttpRequestParser(mock.Mock(), mock.Mock(), 2**16)
    try:
        messages, _, _ = parser.feed_data(f"{method} {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    except (HttpProcessingError, ValueError):
        return False
    stubs = [mock.Mock() for _ in range(5)]
    resolving = APP.router.resolve(web.Request(messages[0][0], *stubs))
    try:
        resolving.send(None)
    except StopIteration as e:
        match = e.value
    return match.handler is APP["prompt"]


def spell(letter: str) -> st.SearchStrategy[str]:
    code = f"%{ord(letter):02x}"
    return st.sampled_from(
        [letter] * 6 + [code, code.upper(), letter.upper(), code.replace("%", "%25"), letter * 2]
    )


spellings = st.builds(
    lambda scheme, letters, tail: scheme + "".join(letters) + tail,
    st.sampled_from(["", "", "", "/", "/x/..", "/.", "/api", "/api/api", "/%2e", "http://h:1"]),
    st.sampled_from(["/prompt", "/api/prompt", "/api//prompt"]).flatmap(
        lambda path: st.tuples(*map(spell, path))
    ),
    st.sampled_from(
        ["", "", "", "/", "?a=b", "?/x", "#f", "%00", ";v=1", "/.", "%20", "%2F", "\\"]
    ),
)


@settings(max_examples=1000, deadline=None)
@given(spellings)
@example("/prompt")
@example("/api/prompt?x=1")
@example("/%70rompt")
@example("/%70%72%6F%6d%70%74")
def test_comfyui_what_reaches_the_prompt_handler_takes_the_lock(target: str) -> None:
    if routed_to_prompt("POST", target):
        assert comfyui.classify(b"POST", target.encode()) is Admission.LEASE


def test_comfyui_the_router_of_the_test_is_not_blind() -> None:
    assert routed_to_prompt("POST", "/%70rompt")
    assert routed_to_prompt("POST", "/api/prompt?x")
    assert routed_to_prompt("POST", "/prompt#x")
    assert routed_to_prompt("POST", "http://h/prompt")
    assert not routed_to_prompt("POST", "/api/queue")
    assert not routed_to_prompt("GET", "/prompt")


@pytest.mark.parametrize(
    "target",
    [
        b"/prompt",
        b"/api/prompt",
        b"/%70rompt",
        b"http://h/prompt",
        b"/prompt#x",
        b"//prompt",
        b"/x/../prompt",
    ],
)
def test_comfyui_lease(target: bytes) -> None:
    assert comfyui.classify(b"POST", target) is Admission.LEASE


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"",
        b"*",
        b"/queue",
        b"/api/interrupt",
        b"/free",
        b"/upload/image",
        b"/api/userdata/workflows%2Fprompt",
        b"/prompts",
        b"/x/prompt",
        b"/history?/prompt",
        b"/prompt/x",
    ],
)
def test_comfyui_pass(target: bytes) -> None:
    assert comfyui.classify(b"POST", target) is Admission.PASS


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"PUT"])
def test_comfyui_other_methods_pass(method: bytes) -> None:
    assert comfyui.classify(method, b"/prompt") is Admission.PASS


@given(st.binary(max_size=80))
def test_comfyui_bears_anything(target: bytes) -> None:
    comfyui.classify(b"POST", target)
