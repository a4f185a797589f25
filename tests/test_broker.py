"""One port for llama.cpp and sd-server: which requests are whose, and what a user of stadi finds there."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from system_kit import LLAMA_MODEL, LOOPBACK, completion, running, tick, until

from turnstile.broker import LLAMA, SD, broker_route


@pytest.mark.parametrize(
    "target",
    [
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/",
        "/sdapi/v1/txt2img",
        "/sdapi/v1/img2img",
        "/sdapi/v1/progress?skip_current_image=true",
        "/sdapi/v1/anything/new",
        "/sdcpp/v1/img_gen",
        "/sdcpp/v1/jobs/abc/cancel",
        "/sdcpp/v1/capabilities",
        # as sd-server reads it
        "/%73dapi/v1/txt2img",
        "/sdapi%2Fv1%2Ftxt2img",
        "/v1%2fimages/generations",
    ],
)
def test_what_is_sd_servers(target: str) -> None:
    assert broker_route(target.encode()) == SD


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/favicon.ico",
        "/v1/models",
        "/models",
        "/models/load",
        "/props?model=x",
        "/v1/chat/completions",
        "/v1/images",
        "/v1/imagesx/generations",
        "/sdapi",
        "/sdapix/v1/txt2img",
        "/SDAPI/v1/txt2img",
        "/x/sdapi/v1/txt2img",
        "//sdapi/v1/txt2img",
        "/?x=/sdapi/v1/txt2img",
        "/%2573dapi/v1/txt2img",
        "*",
    ],
)
def test_everything_else_is_llamas(target: str) -> None:
    assert broker_route(target.encode()) == LLAMA


@given(st.binary(), st.sampled_from([b"/v1/images/", b"/sdapi/", b"/sdcpp/"]), st.data())
def test_a_request_has_one_owner_however_it_is_spelled(
    rest: bytes, prefix: bytes, data: Any
) -> None:
    assert broker_route(b"/" + rest) in (SD, LLAMA)
    # Any of its letters may be percent-encoded; the query says nothing.
    spelled = b"".join(
        b"%%%02X" % byte if data.draw(st.booleans()) else bytes([byte]) for byte in prefix[1:]
    )
    tail = rest.replace(b"?", b"").replace(b"%", b"")
    assert broker_route(b"/" + spelled + tail) == SD
    assert broker_route(b"/nobody?" + rest) == LLAMA
