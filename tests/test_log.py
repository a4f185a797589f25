"""The log: formats, levels, secrets, files, signals."""

import gc
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import defer
from twisted.logger import Logger as TwistedLogger
from twisted.logger import LogLevel, LogPublisher, globalLogPublisher

from turnstile import log as tlog
from turnstile.config import RESERVED, Config, ConfigError, Upstream, load


@pytest.fixture(autouse=True)
def level_as_before():
    before = (tlog._rank, tlog.info_enabled, tlog.debug_enabled, tlog._current)
    yield
    tlog._rank, tlog.info_enabled, tlog.debug_enabled, tlog._current = before


class Page:
    """An observer, a logger that writes to it, and what came out."""

    def __init__(self, isatty=False, environ=None, **settings):
        self.stream = io.BytesIO()
        self.observer = tlog.make_observer(Config(**settings), self.stream, isatty, environ)
        self.log = tlog.Logger(namespace="turnstile.x", observer=self.observer)

    @property
    def text(self):
        return self.stream.getvalue().decode()

    @property
    def lines(self):
        return self.text.splitlines()

    @property
    def objects(self):
        return [json.loads(line) for line in self.lines]


def requests_to(page, monkeypatch):
    monkeypatch.setattr(
        tlog, "_requests", tlog.Logger(namespace="turnstile.request", observer=page.observer)
    )


# -- formats


def test_text_line():
    page = Page(log_level="info")
    page.log.info("job {prompt_id} done", prompt_id="a-b", took=1.5, who="it's me")
    (line,) = page.lines
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO  job a-b done took=1\.5 who=\"it's me\"", line
    )


def test_json_line():
    page = Page(log_level="info", log_format="json")
    page.log.warn("job {prompt_id} done", prompt_id="a-b", took=1.5, time=3, msg="x", n=None)
    (line,) = page.objects
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warn",
        "namespace": "turnstile.x",
        "msg": "job a-b done",
        "prompt_id": "a-b",
        "took": 1.5,
        "msg_": "x",
        "n": None,
    }


def test_times():
    assert tlog._timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert tlog._timestamp(1.9999) == "1970-01-01T00:00:01.999Z"
    for odd in (None, "x", float("nan"), float("inf"), 1e300, -1e300):
        assert tlog._timestamp(odd).endswith("Z")


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_value_can_forge_a_line_or_drive_a_terminal(format):
    page = Page(log_level="info", log_format=format, isatty=True)
    evil = "x\n2026-01-01T00:00:00.000Z INFO  forged\r\x1b[31m\x07\x9b\u2028\u202e\ud800\x00"
    page.log.info("got {evil}", evil=evil)
    page.log.info("got", evil=evil, more={evil: [evil]}, **{"odd\nkey": evil})
    assert len(page.lines) == 2
    for line in page.text.split("\n")[:-1]:
        assert line.isprintable()


class Odd:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


def loop():
    value = []
    value.append(value)
    return value


class OddMapping(dict):
    def items(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(
    "value",
    [
        Odd(),
        [Odd()],
        OddMapping(a=1),
        {Odd(): 1},
        loop(),
        float("nan"),
        -float("inf"),
        1 << 100,
        10**5000,
        b"\xff\0",
        {1: {2, 3}},
        "\ud800",
        object(),
        Upstream("http", "h", 1),
        "x" * 100_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values(format, value):
    page = Page(log_level="info", log_format=format)
    page.log.info("{value} {value.missing} {missing} {", value=value)
    page.log.info("value", value=value)
    assert len(page.lines) == 2
    assert len(page.text) < 60_000
    if format == "json":
        assert all(line["namespace"] == "turnstile.x" for line in page.objects)


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.floats(), st.lists)))
def test_any_event_is_one_line(event):
    for format in ("text", "json"):
        page = Page(log_level="debug", log_format=format)
        page.observer({**event, "log_format": "x"})
        assert page.text.count("\n") == 1
        if format == "json":
            assert page.objects


def test_failures_bring_their_traceback():
    for format in ("text", "json"):
        page = Page(log_format=format)
        try:
            raise RuntimeError("first\nsecond \x1b[31m token=abc")
        except RuntimeError:
            page.log.failure("it broke")
        if format == "json":
            (line,) = page.objects
            assert line["level"] == "error"
            assert "RuntimeError: first" in line["traceback"]
        else:
            assert " ERROR it broke" in page.lines[0]
            assert all(line.startswith("    | ") for line in page.lines[1:])
            assert any("RuntimeError: first" in line for line in page.lines)
            assert "\x1b" not in page.text


def test_errors_that_nobody_handled_are_errors():
    page = Page()
    globalLogPublisher.addObserver(page.observer)
    try:
        defer.fail(RuntimeError("lost"))
        gc.collect()
    finally:
        globalLogPublisher.removeObserver(page.observer)
    assert "ERROR Unhandled error in Deferred" in page.text
    assert "lost" in page.text


# -- levels


def test_levels():
    wanted = {"debug": 4, "info": 3, "warn": 2, "error": 1}
    for level, count in wanted.items():
        page = Page(log_level=level)
        for method in (page.log.debug, page.log.info, page.log.warn, page.log.error):
            method("x")
        assert len(page.lines) == count
        assert tlog.info_enabled == (count >= 3)
        assert tlog.debug_enabled == (count == 4)


def test_a_level_can_change_live():
    page = Page()
    page.log.info("no")
    page.observer.set_level("info")
    page.log.info("yes")
    assert len(page.lines) == 1


def test_events_for_any_level():
    page = Page(log_level="error")
    page.log.info("version", turnstile_always=True)
    page.log.info("other")
    assert [line.split()[2:] for line in page.lines] == [["version"]]


def test_no_event_is_built_when_the_level_is_off():
    seen = []
    tlog.set_level("warn")
    log = tlog.Logger(namespace="turnstile.x", observer=seen.append)
    log.info("x")
    log.warn("x")
    assert len(seen) == 1


def test_what_others_mention_is_debug():
    for level, expected in (("info", 0), ("debug", 1)):
        page = Page(log_level=level)
        TwistedLogger(namespace="twisted.web.server.Site", observer=page.observer).info("starting")
        assert len(page.lines) == expected
    assert " DEBUG starting" in page.lines[0]
    page = Page()
    TwistedLogger(namespace="twisted.x", observer=page.observer).warn("careful")
    assert " WARN  careful" in page.text


def test_an_observer_that_is_asked_while_it_prints_does_not_loop():
    page = Page(log_level="info")

    class Chatty:
        def __str__(self):
            page.log.info("again {me}", me=self)
            return "chatty"

    page.log.info("{it}", it=Chatty())
    assert len(page.lines) == 1


# -- requests and colours


def test_requests(monkeypatch):
    page = Page(log_level="info")
    requests_to(page, monkeypatch)
    tlog.log_request_in(b"POST", b"/api/chat?token=abc", "192.0.2.1", "ollama")
    tlog.log_request_out(b"POST", b"/api/chat?token=abc", 200, 1.23456, engine="ollama", bytes=5)
    tlog.log_request_out("GET", b"/x", 0, 0.5)
    assert [line.split("Z ", 1)[1] for line in page.lines] == [
        "INFO  --> POST /api/chat?token=*** client=192.0.2.1 engine=ollama",
        "INFO  <-- 200 POST /api/chat?token=*** 1.235s bytes=5 engine=ollama",
        "INFO  <-- --- GET /x 0.500s",
    ]


def test_requests_cost_nothing_when_off(monkeypatch):
    page = Page(log_level="warn")
    requests_to(page, monkeypatch)
    monkeypatch.setattr(tlog, "redact_target", None)
    tlog.log_request_in(b"GET", b"/", "c")
    tlog.log_request_out(b"GET", b"/", 200, 1.0)
    assert page.text == ""


@pytest.mark.parametrize(
    ("status", "colour"),
    [(200, 32), (304, 32), (404, 33), (503, 31), (0, 31)],
)
def test_colours(monkeypatch, status, colour):
    page = Page(isatty=True, log_level="info")
    requests_to(page, monkeypatch)
    tlog.log_request_in(b"GET", b"/")
    tlog.log_request_out(b"GET", b"/", status, 1.0)
    assert "\x1b[36m-->\x1b[0m GET /" in page.lines[0]
    assert f"\x1b[{colour}m<-- {status or '---'}\x1b[0m GET /" in page.lines[1]


@pytest.mark.parametrize(
    ("isatty", "environ", "colour"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_to_colour(isatty, environ, colour):
    assert tlog.wants_colour(isatty, environ) is colour


def test_json_and_files_have_no_colours(tmp_path, monkeypatch):
    page = Page(isatty=True, log_level="info", log_format="json")
    requests_to(page, monkeypatch)
    tlog.log_request_out(b"GET", b"/", 200, 1.0)
    (line,) = page.objects
    assert set(line) == {*"time level namespace msg method target status duration".split()}
    assert (line["status"], line["duration"]) == (200, 1.0)
    path = tmp_path / "log"
    page = Page(True, {"FORCE_COLOR": "1"}, log_file=str(path))
    page.log.error("x")
    assert "\x1b" not in path.read_text()


# -- secrets


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (b"/a?token=s3cret", "/a?token=***"),
        (b"/a?x=1&API_KEY=s3cret&y=2", "/a?x=1&API_KEY=***&y=2"),
        (b"/a?api-key=s3cret;sig=s3cret", "/a?api-key=***;sig=***"),
        (b"/a?access_token=s3cret", "/a?access_token=***"),
        (b"/a?%74oken=s3cret", "/a?%74oken=***"),
        (b"/a?Authorization=Bearer%20s3cret", "/a?Authorization=***"),
        (b"/a?key=s3cret?token=s3cret", "/a?key=***"),
        (b"/a?auth=s3cret=s3cret", "/a?auth=***"),
        (b"/a?X-Amz-Signature=s3cret", "/a?X-Amz-Signature=***"),
        (b"http://u:s3cret@h/a", "http://***@h/a"),
        (b"//u:s3cret@h/a", "//***@h/a"),
        (b"/a?b=http://u:s3cret@h/", "/a?b=http://***@h/"),
        (b"/a?b=http%3a%2f%2fu:s3cret%40h/", "/a?b=http%3a%2f%2f***@h/"),
        (b"/a?b=http%3A%2F%2Fu%3As3cret@h/", "/a?b=http%3A%2F%2F***@h/"),
        (b"/a?sid=s3cret&session=s3cret", "/a?sid=***&session=***"),
        (b"/a@b", "/a@b"),
        (b"/ws?clientId=abc", "/ws?clientId=abc"),
        (b"/view?filename=a.png&type=output", "/view?filename=a.png&type=output"),
        (b"/a?token", "/a?token"),
        (b"/a?token=", "/a?token="),
        (b"/%2F//x?", "/%2F//x?"),
        (b"/\xff\x1b\n", "/\\xff\\x1b\\n"),
        (b"", ""),
    ],
)
def test_targets(target, shown):
    assert tlog.redact_target(target) == shown


@given(st.binary())
def test_any_target_can_be_shown(target):
    assert tlog.redact_target(target).isprintable()


@pytest.mark.parametrize(
    "piece", ["token", "?", "&key", "://", "cookie: '", "Bearer ", "?a=", "//", "%2f"]
)
def test_looking_for_secrets_takes_linear_time(piece):
    text = "?" + piece * (500_000 // len(piece))
    before = time.monotonic()
    tlog._scrub(text)
    tlog.redact_target(text.encode())
    assert time.monotonic() - before < 5  # quadratic would be minutes


@pytest.mark.parametrize("format", ["text", "json"])
def test_secrets_that_slipped_through(format):
    page = Page(log_level="debug", log_format=format)
    for message in (
        "GET /a?b=1&access_token=s3cret HTTP/1.1",
        "GET /a?b=1?token=s3cret HTTP/1.1",
        "Authorization: Basic s3cret",
        "{'Authorization': 'Bearer s3cret'}",
        "Headers({b'authorization': [b'Bearer s3cret']})",
        "Cookie: a=s3cret; b=s3cret",
        "got Bearer s3cret.s3cret",
        "connecting to https://me:s3cret@gpu/",
        "GET /a?b=https://me:s3cret@gpu/ HTTP/1.1",
    ):
        page.log.info("{message}", message=message)
        page.log.info("x", message_=message, deep={"a": [message]})
    page.log.info("x", authorization="s3cret", cookie="s3cret", set_cookie=["s3cret"])
    page.log.info("x", deep={"Authorization": "s3cret"}, headers={"x": "s3cret"})
    try:
        raise RuntimeError("GET /?token=s3cret")
    except RuntimeError:
        page.log.failure("x")
    assert "s3cret" not in page.text
    assert "***" in page.text


# -- start-up


def test_startup_lines_at_any_level():
    page = Page(log_level="error")
    reserved = min(RESERVED)
    environ = {"OLLAMA_URL": "http://gpu:1", "LOGLEVEL": "error", reserved: "1"}
    config = load({}, environ, default_file="/nonexistent")
    tlog.log_startup(page.log, config, "1.2.3")
    assert "turnstile 1.2.3 starting" in page.lines[0]
    assert any(
        "setting OLLAMA_URL=http://gpu:1 (environment variable OLLAMA_URL)" in line
        for line in page.lines
    )
    assert len(page.lines) == 2 + len(config.describe())
    assert f"WARN  environment variable {reserved} has no effect" in page.lines[-1]


# -- files


def test_log_file_is_appended_to(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    page = Page(log_file=str(path))
    page.log.error("x")
    assert page.text == ""
    assert path.read_text().startswith("before\n")
    assert path.read_text().endswith(" ERROR x\n")


def test_log_file_is_opened_again(tmp_path):
    path, old = tmp_path / "log", tmp_path / "old"
    page = Page(log_file=str(path))
    page.log.error("one")
    path.rename(old)
    page.log.error("two")
    tlog.reopen()
    page.log.error("three")
    assert old.read_text().count("\n") == 2
    assert path.read_text().count("\n") == 1
    assert path.stat().st_mode & 0o7 == 0


@pytest.mark.parametrize("gone", ["deleted", "moved", "replaced"])
def test_a_file_that_went_away_is_made_again(tmp_path, gone):
    path = tmp_path / "log"
    page = Page(log_file=str(path))
    page.observer.sink.check_every = 0
    page.log.error("one")
    if gone == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "old")
    if gone == "replaced":
        path.write_text("")
    page.log.error("two")
    assert path.read_text().endswith("two\n")


def test_a_file_that_cannot_be_opened_again_stays(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    page = Page(log_file=str(folder / "log"))
    page.observer.sink.check_every = 0
    page.log.error("one")
    folder.rename(tmp_path / "elsewhere")
    page.log.error("two")
    tlog.reopen()
    page.log.error("three")
    lines = (tmp_path / "elsewhere" / "log").read_text().splitlines()
    assert len(lines) == 4
    assert "WARN  the log file can't be opened again" in lines[2] and str(folder) in lines[2]


@pytest.mark.limit(10)
def test_a_named_pipe_that_nobody_reads_is_one_clear_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="can't be written: "):
        tlog.make_observer(Config(log_file=str(tmp_path / "pipe")), io.BytesIO())


@pytest.mark.parametrize("path", ["/nonexistent/log", "/", "/dev/null/x", "a\0b"])
def test_a_file_that_cannot_be_written_is_one_clear_line(path):
    with pytest.raises(ConfigError, match="can't be written: ") as caught:
        tlog.make_observer(Config(log_file=path), io.BytesIO())
    assert "\n" not in str(caught.value)


def test_a_full_disk_loses_lines_only():
    page = Page(log_file="/dev/full")
    page.log.error("x")
    page.observer.close()
    page.log.error("x")


def test_a_broken_stream_loses_lines_only():
    page = Page()
    page.stream.close()
    page.log.error("x")


def test_a_text_stream():
    stream = io.StringIO()
    observer = tlog.make_observer(Config(), stream)
    tlog.Logger(namespace="turnstile", observer=observer).error("\u00fcber")
    assert stream.getvalue().endswith(" ERROR \u00fcber\n")


def test_syslog(monkeypatch):
    import syslog

    sent = []
    monkeypatch.setattr(syslog, "openlog", lambda *args: None)
    monkeypatch.setattr(syslog, "syslog", lambda *args: sent.append(args))
    observer = tlog.make_observer(Config(), tlog.SyslogSink("turnstile"))
    tlog.Logger(namespace="turnstile", observer=observer).warn("x {a}", a=1)
    assert sent == [(syslog.LOG_WARNING, "WARN  x 1")]


def test_observers_work_behind_a_publisher():
    page = Page()
    publisher = LogPublisher(page.observer)
    publisher({"log_level": LogLevel.error, "log_format": "x", "log_namespace": "y"})
    assert len(page.lines) == 1


# -- SIGHUP

PROGRAM = """
import os, sys
from twisted.internet import reactor
from turnstile.log import install_sighup
restore = install_sighup(reactor, lambda: (os.write(3, b"called "), reactor.callLater(0, done)))
def done():
    restore()
    reactor.stop()
reactor.callWhenRunning(os.write, 3, b"ready ")
reactor.run()
os.write(3, b"end")
"""


def start(tmp_path, **kwargs):
    read, write = os.pipe()
    program = f"import os; os.dup2({write}, 3)\n" + PROGRAM
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[write], **kwargs)
    os.close(write)
    assert os.read(read, 6) == b"ready "
    return process, os.fdopen(read, "rb")


def test_sighup_calls_back(tmp_path):
    process, pipe = start(tmp_path, stdin=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    with pipe:
        assert pipe.read() == b"called end"
    assert process.wait() == 0


def test_a_terminal_that_is_gone_ends_a_process_in_the_foreground(tmp_path):
    master, slave = pty.openpty()
    process, pipe = start(tmp_path, stdin=slave)
    os.close(slave)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    with pipe:
        assert pipe.read() == b"end"
    assert process.wait() == 0
