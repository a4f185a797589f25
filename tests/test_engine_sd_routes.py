"""sd-server's table, and reading what it says of jobs."""

from __future__ import annotations

import json

import pytest
from engine_kit import Http, Response, result_of
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock

from turnstile.engines.base import Admission
from turnstile.engines.client import BadAnswer, Broken, ClientError, HttpError, JsonClient, TimedOut
from turnstile.engines.sd_jobs import (
    PREFIX_LIMIT,
    JobView,
    Outcome,
    find_job_id,
    look_at_job,
    parse_job,
)
from turnstile.engines.sd_routes import cancelled_job, classify, generation_kind

SYNC = [
    b"/v1/images/generations",
    b"/v1/images/edits",
    b"/v1/images/variations",
    b"/sdapi/v1/txt2img",
    b"/sdapi/v1/img2img",
    b"/sdcpp/v1/upscale",
]
ASYNC = [b"/sdcpp/v1/img_gen", b"/sdcpp/v1/vid_gen"]
OBSERVED = [
    b"/",
    b"/v1/models",
    b"/v1/images",
    b"/favicon.ico",
    b"/sdapi/v1/progress",
    b"/sdapi/v1/options",
    b"/sdapi/v1/interrupt",
    b"/sdapi/v1/sd-models",
    b"/sdapi/v1/samplers",
    b"/sdapi/v1/txt2img2",
    b"/xsdapi/v1/txt2img",
    b"/sdapi/v2/txt2img",
    b"/sdcpp",
    b"/sdcpp/v1/jobs/job_1",
    b"/sdcpp/v1/jobs/job_1/cancel",
    b"*",
    b"",
]


@pytest.mark.parametrize("path", SYNC + ASYNC)
def test_what_generates(path: bytes) -> None:
    kind = "sync" if path in SYNC else "async"
    for target in (path, path + b"?x=1", path + b"#x", b"http://h:1234" + path):
        assert generation_kind(b"POST", target) == kind
        for is_up in (True, False):
            assert classify(b"POST", target, is_up) is Admission.LEASE


@pytest.mark.parametrize("path", SYNC + ASYNC + OBSERVED)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"PUT"])
def test_nothing_else_does(method: bytes, path: bytes) -> None:
    assert generation_kind(method, path) is None
    assert classify(method, path, True) is Admission.PASS
    assert classify(method, path, False) is Admission.ABSENT


@pytest.mark.parametrize("path", OBSERVED)
def test_posts_that_generate_nothing(path: bytes) -> None:
    assert generation_kind(b"POST", path) is None
    assert classify(b"POST", path, True) is Admission.PASS
    assert classify(b"POST", path, False) is Admission.ABSENT


@pytest.mark.parametrize(
    "target",
    [
        b"/sdapi/v1/%74xt2img",
        b"/sdapi%2Fv1%2ftxt2img",
        b"/sdapi/v1/%2574xt2img",
        b"/sdapi/v1/%u0074xt2img",
        b"//sdapi//v1/txt2img/",
        b"/x/../sdapi/./v1/txt2img",
        b"/SDAPI/v1/Txt2Img",
        b"\\sdapi\\v1\\txt2img",
    ],
)
def test_odd_spellings_count_as_generations(target: bytes) -> None:
    assert generation_kind(b"POST", target) == "sync"
    assert generation_kind(b"post", target) == "sync"


@given(st.sampled_from(SYNC + ASYNC), st.data())
def test_percent_signs_hide_nothing(path: bytes, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=len(path), max_size=len(path)))
    target = b"".join(
        b"%%%02x" % byte if coded else bytes([byte])
        for byte, coded in zip(path, chosen, strict=True)
    )
    assert generation_kind(b"POST", target) == generation_kind(b"POST", path)


@given(st.binary(max_size=60))
def test_no_target_breaks_the_table(target: bytes) -> None:
    classify(b"POST", target, False)
    cancelled_job(b"POST", b"/sdcpp/v1/jobs/" + target)


def test_cancelled_jobs() -> None:
    assert cancelled_job(b"POST", b"/sdcpp/v1/jobs/job_1a_00000001/cancel") == "job_1a_00000001"
    assert cancelled_job(b"POST", b"/sdcpp/v1/jobs/job%5f1/cancel?x") == "job_1"
    for method, target in (
        (b"GET", b"/sdcpp/v1/jobs/j/cancel"),
        (b"POST", b"/sdcpp/v1/jobs/j"),
        (b"POST", b"/sdcpp/v1/jobs/j/cancel/x"),
        (b"POST", b"/sdcpp/v1/jobs//cancel"),
    ):
        assert cancelled_job(method, target) is None


# -- the answer to a job's POST

QUEUED = {"id": "job_6a_00000001", "kind": "img_gen", "status": "queued", "created": 1}


def test_the_id_of_a_job() -> None:
    body = json.dumps(QUEUED).encode()
    assert find_job_id([], body, True, 1000) == "job_6a_00000001"
    assert find_job_id([], body[:40], False, 1000) == "job_6a_00000001"
    assert find_job_id([(b"content-encoding", b"identity")], body, True, 1000) == "job_6a_00000001"
    import gzip

    packed = gzip.compress(body)
    assert find_job_id([(b"Content-Encoding", b"gzip")], packed, True, 1000) == "job_6a_00000001"
    assert find_job_id([(b"Content-Encoding", b"gzip")], packed[:-9], False, 1000) is not None


@pytest.mark.parametrize(
    ("body", "complete"),
    [
        *((body, True) for body in (b"", b"[]", b"{}", b'{"id":5}', b'{"id":""}', b"\xff")),
        (b"[" * 100_000, True),
        (b'{"id":"job_1', False),
        (b"", False),
    ],
)
def test_no_id(body: bytes, complete: bool) -> None:
    assert find_job_id([], body, complete, 1000) is None


def test_no_id_in_a_coding_that_nobody_knows() -> None:
    assert find_job_id([(b"Content-Encoding", b"br")], b"x", True, 1000) is None


# -- how a job stands


def answer(status: str, *, sort: bool = False, **more: object) -> bytes:
    return json.dumps(
        {**QUEUED, "status": status, "completed": None, "queue_position": 0, **more},
        sort_keys=sort,
    ).encode()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("queued", None),
        ("generating", None),
        ("something new", None),
        ("completed", Outcome.SUCCESS),
        ("failed", Outcome.ERROR),
        ("cancelled", Outcome.CANCELLED),
    ],
)
def test_how_a_job_stands(status: str, outcome: Outcome | None) -> None:
    assert parse_job(answer(status), True) == JobView(status, outcome)
    assert parse_job(answer(status, queue_position=3), True) == JobView(status, outcome, 3)


@pytest.mark.parametrize("sort", [True, False])
def test_the_beginning_of_an_answer_tells_it(sort: bool) -> None:
    long = answer("completed", sort=sort, completed=5, result={"images": ["A" * 5000]})[:1000]
    assert parse_job(long, False) == JobView("completed", Outcome.SUCCESS)
    # A preview of one that is not over.
    long = answer("generating", sort=sort, preview={"b64_json": "A" * 5000})[:1000]
    assert parse_job(long, False) == JobView("generating")
    # What a message says is no member.
    odd = answer("failed", sort=sort, error={"message": '"status": "queued", "completed": 7'})
    assert parse_job(odd[:-1], False).outcome is Outcome.ERROR


@pytest.mark.parametrize(
    ("body", "complete"),
    [
        *((body, True) for body in (b"", b"[]", b"{}", b'{"status":5}', b"\xff")),
        (b'{"result":"AAAA', False),
        (b"", False),
    ],
)
def test_what_does_not_tell_it(body: bytes, complete: bool) -> None:
    with pytest.raises(BadAnswer):
        parse_job(body, complete)


def look(answered: object) -> list[object]:
    http, clock = Http(), Clock()
    http.answer = lambda method, path, payload: answered
    client = JsonClient(http, clock, "http://127.0.0.1:55557")
    found = result_of(look_at_job(client, clock, "job/ä", 5.0))
    assert http.calls == [("GET", "/sdcpp/v1/jobs/job%2F%C3%A4", None)]
    clock.advance(6.0)
    assert not clock.getDelayedCalls()
    return [getattr(result, "value", result) for result in found]


def test_looking_at_a_job() -> None:
    assert look(Response(200, answer("queued"))) == [JobView("queued")]
    (error,) = look(Response(404, b"{}"))
    assert isinstance(error, HttpError) and error.status == 404
    (error,) = look(Response(200, answer("queued"), ConnectionLost()))
    assert isinstance(error, Broken)
    (error,) = look(Response(200, b"[]"))
    assert isinstance(error, BadAnswer)


def test_of_a_large_answer_only_the_beginning_is_read() -> None:
    response = Response(200, answer("completed", completed=5, result="A" * 2 * PREFIX_LIMIT))
    assert look(response) == [JobView("completed", Outcome.SUCCESS)]
    assert response.dropped


def test_an_answer_that_does_not_end() -> None:
    response = Response(200, answer("queued"), TimeoutError())
    (error,) = look(response)
    assert isinstance(error, TimedOut) and isinstance(error, ClientError)
    assert response.dropped
