"""Sockets that systemd opened: whose they are, and real processes that are stopped and started behind them."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from process_kit import (
    PATIENCE,
    Client,
    Twistd,
    ask,
    eventually,
    listening,
    listening_unix,
    twistd,
)
from system_kit import SPEED, chat_body, in_thread, reactor, running, tick, until

from turnstile import activation, service
from turnstile.activation import Assignment, Inherited, Listener, assign, parse_environment
from turnstile.config import ConfigError
from turnstile.proxy import channel
from turnstile.sim import GpuHost

ENGINE = ("--ollama=http://127.0.0.1:1", "--config=/dev/null")


# -- what systemd passed


def test_nothing_was_passed() -> None:
    assert parse_environment({}, 7) == []
    assert parse_environment({"LISTEN_PID": "8", "LISTEN_FDS": "1"}, 7) == []


def test_names() -> None:
    environ = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "ollama:comfyui"}
    assert parse_environment(environ, 7) == [(3, "ollama"), (4, "comfyui")]
    del environ["LISTEN_FDNAMES"]
    assert parse_environment(environ, 7) == [(3, ""), (4, "")]


@pytest.mark.parametrize(
    ("count", "names", "reason"),
    [
        ("x", "", "LISTEN_FDS='x' is not a number of sockets"),
        ("-1", "", "LISTEN_FDS='-1' is not a number of sockets"),
        ("", "", "LISTEN_FDS='' is not a number of sockets"),
        ("1000", "", "LISTEN_FDS=1000: more than 256 sockets"),
        ("2", "a", "LISTEN_FDNAMES has 1 names for 2 sockets"),
    ],
)
def test_nonsense(count: str, names: str, reason: str) -> None:
    environ = {"LISTEN_PID": "7", "LISTEN_FDS": count, "LISTEN_FDNAMES": names}
    with pytest.raises(ConfigError) as caught:
        parse_environment(environ, 7)
    assert str(caught.value) == reason


def test_the_environment_is_cleared_and_told_from_the_start_of_the_process() -> None:
    environ = {"LISTEN_PID": "8", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert activation.take_environment(environ, 7) == ()
    assert environ == {"HOME": "/"}
    initial = {"LISTEN_PID": "7", "LISTEN_FDS": "x"}
    with pytest.raises(ConfigError, match="LISTEN_FDS='x'"):
        activation.take_environment(environ, 7, initial)


def test_the_environment_at_the_start_of_this_process() -> None:
    found = activation.initial_environment()
    assert found["PATH"] and "" not in found


def inspect(sock: Any) -> Inherited:
    return activation._inspect(sock.fileno(), "x")


def test_a_descriptor_is_looked_at_and_kept_from_children(tmp_path: Path) -> None:
    with listening() as sock:
        sock.set_inheritable(True)
        found = inspect(sock)
        assert (found.family, found.address) == (socket.AF_INET, sock.getsockname())
        assert str(found) == f"127.0.0.1:{sock.getsockname()[1]}"
        assert fcntl.fcntl(sock.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with listening_unix(str(tmp_path / "s")) as sock:
        assert str(inspect(sock)) == str(tmp_path / "s")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_descriptors_that_do_not_listen(kind: int) -> None:
    with socket.socket(socket.AF_INET, kind) as sock:
        with pytest.raises(ConfigError) as caught:
            inspect(sock)
        assert str(caught.value).endswith(
            "is no stream socket that listens (ListenStream=, Accept=no)"
        )
    with open("/dev/null") as file:
        with pytest.raises(ConfigError, match=r"\(x\), passed by systemd, is no socket"):
            inspect(file)
        number = file.fileno()
    with pytest.raises(ConfigError, match=f"descriptor {number} .* can't be used: Bad file"):
        activation._inspect(number, "x")


# -- who gets what

_fds = itertools.count(3)


def passed(name: str, host: str = "0.0.0.0", port: int = 11434, fd: int = 3) -> Inherited:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return Inherited(fd, name, family, (host, port))


BY_DEFAULT = {
    "ollama": Listener("tcp:11434", "LISTEN_OLLAMA"),
    "comfyui": Listener("tcp:8188", "LISTEN_COMFY"),
}


def by_hand(endpoint: str) -> dict[str, Listener]:
    return {**BY_DEFAULT, "ollama": Listener(endpoint, "LISTEN_OLLAMA", "--listen-ollama")}


def test_names_decide_and_not_the_order() -> None:
    comfyui, ollama = passed("comfyui", port=1), passed("ollama", port=2, fd=4)
    assignment = assign([comfyui, ollama], BY_DEFAULT)
    assert assignment == Assignment({"comfyui": (comfyui,), "ollama": (ollama,)}, ())


def test_several_sockets_of_one_name() -> None:
    both = passed("ollama"), passed("ollama", "::1", fd=4)
    assert assign(both, BY_DEFAULT) == Assignment({"ollama": both}, ())


def test_sockets_that_nobody_has_a_use_for() -> None:
    spare = passed("comfyui"), passed("nobody", fd=4)
    assignment = assign(spare, {"ollama": BY_DEFAULT["ollama"]})
    assert assignment == Assignment({}, spare)


def test_one_socket_without_a_name_and_one_listener() -> None:
    (sock,) = socks = (passed(""),)
    assert assign(socks, {"ollama": BY_DEFAULT["ollama"]}) == Assignment({"ollama": (sock,)}, ())


@pytest.mark.parametrize("number", [1, 2])
def test_who_gets_a_socket_without_a_name_is_not_guessed(number: int) -> None:
    socks = [passed("", fd=3 + n) for n in range(number)]
    with pytest.raises(ConfigError) as caught:
        assign(socks, BY_DEFAULT)
    assert str(caught.value) == (
        f"systemd passes {number} sockets without a name: FileDescriptorName= says whose they are"
        " (ollama, comfyui)"
    )


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp:11434", "0.0.0.0"),
        ("tcp:11434", "::"),
        ("tcp:port=11434:interface=127.0.0.1", "127.0.0.1"),
        ("tcp:11434:interface=localhost", "127.0.0.1"),
        (r"tcp:11434:interface=\:\:1", "::1"),
        (r"tcp:11434:interface=\:\:", "::"),
    ],
)
def test_a_setting_that_agrees(endpoint: str, host: str) -> None:
    sock = passed("ollama", host)
    assert assign([sock], by_hand(endpoint)).taken == {"ollama": (sock,)}


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp:11435",
        "tcp:11434:interface=127.0.0.1",
        r"tcp:11434:interface=\:\:1",
        "unix:/run/x",
        "ssl:11434",
    ],
)
def test_a_setting_that_contradicts_is_fatal(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assign([passed("ollama")], by_hand(endpoint))
    assert str(caught.value) == (
        "systemd passes a socket named ollama (0.0.0.0:11434), but LISTEN_OLLAMA (--listen-ollama) is"
        f" {endpoint}: change the one or the other"
    )


def test_unix_sockets_agree_by_path() -> None:
    sock = Inherited(3, "ollama", socket.AF_UNIX, "/run/x")
    assert assign([sock], by_hand("unix:/run/./x")).taken == {"ollama": (sock,)}
    with pytest.raises(ConfigError):
        assign([sock], by_hand("unix:/run/y"))
    abstract = Inherited(3, "ollama", socket.AF_UNIX, b"\0x")
    assert str(abstract) == "@x"


def test_systemd_endpoints() -> None:
    one, two = passed("a"), passed("b", fd=4)
    for endpoint, wanted in (
        ("systemd:domain=INET:index=1", two),
        ("systemd:domain=INET:index=0", one),
        ("systemd:domain=INET:name=b", two),
    ):
        assignment = assign([one, two], by_hand(endpoint))
        assert assignment.taken == {"ollama": (wanted,)}
        assert assignment.spare == tuple(sock for sock in (one, two) if sock is not wanted)


@pytest.mark.parametrize("which", ["index=2", "name=c"])
def test_systemd_endpoints_that_mean_nothing(which: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assign([passed("a"), passed("", fd=4)], by_hand(f"systemd:domain=INET:{which}"))
    assert str(caught.value) == (
        f"LISTEN_OLLAMA (systemd:domain=INET:{which}): systemd passed no such socket"
        " (it passed: a at 0.0.0.0:11434, no name at 0.0.0.0:11434)"
    )


def test_systemd_endpoints_that_mean_too_much() -> None:
    socks = [passed("a"), passed("a", fd=4)]
    with pytest.raises(ConfigError, match="passed 2 sockets of that name, use index="):
        assign(socks, by_hand("systemd:domain=INET:name=a"))
    with pytest.raises(ConfigError, match="two listeners can't have the same socket"):
        assign(
            socks,
            {
                "ollama": Listener("systemd:domain=INET:index=0", "LISTEN_OLLAMA", "x"),
                "comfyui": Listener("systemd:domain=INET:index=0", "LISTEN_COMFY", "x"),
            },
        )
    with pytest.raises(ConfigError, match=r"named ollama .* but LISTEN_OLLAMA .* means another"):
        assign([passed("a"), passed("ollama", fd=4)], by_hand("systemd:domain=INET:name=a"))


@given(
    names=st.lists(st.sampled_from(["ollama", "comfyui", "other", ""]), max_size=5),
    listeners=st.sets(st.sampled_from(["ollama", "comfyui", "ollama-nested"])),
)
def test_every_socket_goes_somewhere_once(names: list[str], listeners: set[str]) -> None:
    socks = [passed(name, fd=3 + index) for index, name in enumerate(names)]
    try:
        assignment = assign(socks, {name: Listener("tcp:1", name.upper()) for name in listeners})
    except ConfigError:
        assert "" in names
        return
    given_out = [sock for taken in assignment.taken.values() for sock in taken]
    assert sorted(s.fd for s in (*given_out, *assignment.spare)) == [s.fd for s in socks]
    for name, taken in assignment.taken.items():
        assert taken and all(sock.name in (name, "") for sock in taken)
    assert all(sock.name not in listeners for sock in assignment.spare)


# -- real processes


def test_two_sockets_go_where_they_belong_and_a_third_is_refused(tmp_path: Path) -> None:
    with (
        listening() as comfyui,
        listening("::") as ollama,
        listening() as nobody,
        twistd(
            tmp_path,
            *ENGINE,
            "--comfy=http://127.0.0.1:1",
            "--loglevel=info",
            # In the order that their index would get wrong.
            sockets=[comfyui, nobody, ollama],
            names=["comfyui", "other", "ollama"],
        ) as run,
    ):
        run.until_said("ollama listens on")
        for engine, sock in (("ollama", ollama), ("comfyui", comfyui)):
            with Client(("127.0.0.1", sock.getsockname()[1])) as client:
                client.send("/api/anything")
                (line,) = eventually(
                    lambda engine=engine: run.said(f"engine={engine}")[:1], "the request"
                )
                # Through a socket of both families IPv4 clients keep their address.
                assert re.search(r"GET /api/anything client=127\.0\.0\.1 engine=", line), line
        status, body = ask(nobody.getsockname(), "/api/chat", "POST")
        assert status == 503
        assert json.loads(body) == {
            "error": "this port has no engine: turnstile knows no listener named other"
        }
        assert ask(nobody.getsockname(), "/healthz")[0] == 200
        assert run.stop() == 0
    assert len(run.said("WARN  systemd passes a socket (other at 127.0.0.1:")) == 1
    assert run.said("Traceback") == []


def test_a_socket_whose_engine_is_not_configured_says_what_to_set(tmp_path: Path) -> None:
    with (
        listening() as comfyui,
        twistd(
            tmp_path,
            *ENGINE,
            "--listen-ollama=127.0.0.1:0",
            sockets=[comfyui],
            names=["comfyui"],
        ) as run,
    ):
        status, body = ask(comfyui.getsockname(), "/v1/prompt", "POST")
        assert (status, json.loads(body)["error"]["message"]) == (
            503,
            "this port has no engine: turnstile's COMFY_URL is not set",
        )
        assert run.stop() == 0


@pytest.mark.parametrize(
    ("options", "names", "reason"),
    [
        (["--listen-ollama=127.0.0.1:2"], ["ollama"], "change the one or the other"),
        (["--listen-ollama=systemd:domain=INET:name=x"], ["y"], "systemd passed no such socket"),
        (["--comfy=http://127.0.0.1:1"], None, "FileDescriptorName= says whose they are"),
    ],
)
def test_contradictions_end_the_start(
    tmp_path: Path, options: list[str], names: list[str] | None, reason: str
) -> None:
    with (
        listening() as sock,
        twistd(tmp_path, *ENGINE, *options, sockets=[sock], names=names) as run,
    ):
        assert run.ended() == 2
    (line,) = run.lines()
    assert line.startswith("turnstile: ") and reason in line


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_who_connects_while_the_service_is_down_is_answered(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "s")
    sock = listening_unix(path) if kind == "unix" else listening()
    mode = os.stat(path).st_mode if kind == "unix" else 0
    with sock:
        address = sock.getsockname()
        with Client(address) as early:
            early.send()
            for _ in range(2):  # a socket outlives the process that accepts from it
                with twistd(tmp_path, *ENGINE, sockets=[sock], names=["ollama"]) as run:
                    assert early.answer()[0] == 200
                    assert ask(address)[0] == 200
                    assert run.stop() == 0
                early.close()
                early.__init__(address)  # type: ignore[misc]
                early.send()
            assert early.is_open(0.05)
        if kind == "unix":
            assert os.stat(path).st_mode == mode
        else:
            backlog = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            assert (
                int.from_bytes(backlog[28:32], "little") == 128
            )  # tcpi_sacked: what listen() was told
    assert run.said("Traceback") == []


def test_the_endpoints_of_twisted_are_understood_by_name(tmp_path: Path) -> None:
    with (
        listening() as one,
        listening() as two,
        twistd(
            tmp_path,
            *ENGINE,
            "--comfy=http://127.0.0.1:1",
            "--listen-ollama=systemd:domain=INET:index=1",
            "--listen-comfy=systemd:domain=INET:name=first",
            "--loglevel=info",
            sockets=[one, two],
            names=["first", "second"],
        ) as run,
    ):
        run.until_said(
            f"ollama listens on IPv4Address(type='TCP', host='127.0.0.1', port={two.getsockname()[1]})"
        )
        run.until_said(
            f"comfyui listens on IPv4Address(type='TCP', host='127.0.0.1', port={one.getsockname()[1]})"
        )
        assert ask(one.getsockname())[0] == 200
        assert run.stop() == 0


# -- the stop


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(channel, "FIRST_REQUEST_TIME", 30.0)
    monkeypatch.setattr(service, "SETTLE_TIME", 30.0)


@pytest.mark.usefixtures("patient")
@pytest_twisted.ensureDeferred
async def test_who_has_just_connected_is_still_served_at_the_stop() -> None:
    async with running(shutdown_timeout=60.0) as s:
        fresh, partial = await s.wire(), await s.wire()
        partial.send(b"GET /api/ver")
        await until(lambda: len(s.service.sites["ollama"].channels) == 2)
        await tick(0.05)
        stopped = s.service.stopService()
        await tick(0.05)
        assert not stopped.called
        fresh.send_request("POST", "/api/chat", chat_body(stream=False))
        partial.send(b"sion HTTP/1.1\r\nHost: x\r\n\r\n")
        for wire in (fresh, partial):
            await wire.closed()
            assert wire.status == 200
            assert b"connection: close" in bytes(wire.received).lower()
        await stopped


@pytest_twisted.ensureDeferred
async def test_who_connected_and_stays_silent_holds_up_the_stop_for_a_second_at_most() -> None:
    async with running(shutdown_timeout=30.0) as s:
        silent = await s.wire()
        await until(lambda: s.service.sites["ollama"].channels)
        began = reactor.seconds()
        await s.service.stopService()
        assert silent.lost is not None or (await silent.closed()) is None
        assert reactor.seconds() - began < 10.0
        assert silent.received == b""


@pytest.mark.usefixtures("patient")
@pytest_twisted.ensureDeferred
async def test_a_request_that_is_about_to_be_forwarded_is_not_refused_at_the_stop() -> None:
    async with running(shutdown_timeout=60.0) as s:
        pending = [s.later("GET", "/api/version") for _ in range(20)]
        await until(lambda: len(s.service.sites["ollama"].channels) == 20)
        await s.service.stopService()
        assert [(await answer).status for answer in pending] == [200] * 20


@pytest.mark.usefixtures("patient")
@pytest_twisted.ensureDeferred
async def test_a_request_in_the_kernel_of_a_kept_connection_is_served_at_the_stop() -> None:
    async with running(shutdown_timeout=60.0) as s:
        wire = await s.wire()
        wire.send_request("GET", "/healthz")
        await wire.until(b"image_pending")
        (kept,) = s.service.sites["ollama"].channels
        wire.received.clear()
        # Nobody reads it before the stop.
        kept.transport.stopReading()
        wire.send_request("GET", "/api/version")
        await until(kept.about_to_ask)
        stopped = s.service.stopService()
        for _ in range(10):
            await tick()
        kept.transport.startReading()
        await wire.closed()
        assert wire.status == 200
        await stopped


def many(address: Any, count: int, go: threading.Event, answers: list[Any]) -> None:
    """Clients, one connection after the other, some of them chats; stopped after ``count``."""
    for number in range(count):
        go.wait(PATIENCE)
        try:
            with Client(address) as client:
                if number % 2:
                    body = json.dumps(chat_body(3, stream=False)).encode()
                    client.send("/api/chat", "POST", body)
                else:
                    client.send("/api/version")
                answers.append(client.answer()[0])
        except OSError as error:
            answers.append(repr(error))


@pytest.mark.slow
@pytest_twisted.ensureDeferred
async def test_restarts_under_load_lose_no_connection(tmp_path: Path) -> None:
    """As systemd does it: SIGTERM, wait, start, while the socket stays open."""
    host = GpuHost(reactor, SPEED)
    await host.start()
    sock = listening(backlog=512)
    address = sock.getsockname()
    runs: list[Twistd] = []
    more: dict[str, Any] = {"sockets": [sock], "names": ["ollama"]}

    def start(number: int) -> Twistd:
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Twistd(
            folder,
            f"--ollama={host.ollama.url}",
            "--config=/dev/null",
            "--shutdown-timeout=4s",
            **more,
        )
        runs.append(run)
        return run

    def restart_thrice() -> None:
        for number in range(1, 4):
            eventually(lambda target=number * 40: len(answers) >= target, "answers")
            assert runs[-1].stop() == 0
            start(number)

    def stream() -> bytes:
        """One long answer, in flight at the first restart."""
        with Client(address) as client:
            client.send("/api/chat", "POST", json.dumps(chat_body(100_000)).encode())
            data = b""
            while True:
                try:
                    piece = client.socket.recv(65536)
                except ConnectionError:
                    return data
                if not piece:
                    return data
                data += piece
                streaming.set()

    answers: list[Any] = []
    go, streaming = threading.Event(), threading.Event()
    clients = [
        threading.Thread(target=many, args=(address, 50, go, answers), daemon=True)
        for _ in range(4)
    ]
    try:
        start(0)
        streamed = in_thread(stream)
        await in_thread(streaming.wait, PATIENCE)
        for client in clients:
            client.start()
        go.set()
        restarts = in_thread(restart_thrice)
        restarts.addTimeout(90.0, reactor)
        for client in clients:
            await in_thread(client.join, PATIENCE * 2)
        await restarts
        data = await streamed
        assert answers == [200] * 200
        # Cut, and seen to be: the last chunk is missing.
        assert data.startswith(b"HTTP/1.1 200") and not data.endswith(b"0\r\n\r\n")
        assert runs[-1].stop() == 0
    finally:
        for run in runs:
            run.kill()
        sock.close()
        await host.stop()
    for run in runs:
        assert run.said("Traceback") == [] and run.said("ERROR") == []
