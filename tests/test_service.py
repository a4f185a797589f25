"""The service as a whole: starting and stopping, the real program, odd upstreams and listeners, what the log tells."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import treq
import websockets
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from program_kit import Program, post
from system_kit import (
    AGENT,
    SPEED,
    chat_body,
    clean,
    in_loop,
    in_thread,
    reactor,
    running,
    tick,
    until,
)
from twisted.internet import ssl
from twisted.internet.defer import ensureDeferred
from twisted.protocols.portforward import ProxyFactory, ProxyServer

import turnstile
from turnstile import config
from turnstile.config import Upstream
from turnstile.sim import GpuHost
from turnstile.sim.graphs import image_graph, sleep_graph

ROOT = Path(turnstile.__file__).parent.parent


# -- stopping, in this process


@pytest_twisted.ensureDeferred
async def test_at_the_stop_waiters_get_503_and_streams_finish() -> None:
    async with running(shutdown_timeout=5.0, busy_retry_after=9) as s:
        stream = s.chat(60)
        await until(lambda: s.host.ollama.active_generations)
        waiting_image = s.prompt()
        await s.until_waiting(image=1)
        waiting_chat = s.chat()
        await s.until_waiting(image=1, llm=1)
        stopped = s.service.stopService()
        for waiter in (waiting_image, waiting_chat):
            answer = await waiter
            assert (answer.status, answer.headers["retry-after"]) == (503, "9")
            assert answer.json()["error"] == "turnstile is shutting down"
        answer = await stream
        assert answer.status == 200 and answer.lines()[-1]["done"] is True
        await stopped


@pytest_twisted.ensureDeferred
async def test_at_the_stop_what_takes_too_long_is_cut_visibly() -> None:
    async with running(shutdown_timeout=0.2) as s:
        wire = await s.wire()
        wire.send_request("POST", "/api/chat", chat_body(100_000))
        await wire.until(b'"content"')
        began = reactor.seconds()
        await s.service.stopService()
        await wire.closed()
        assert reactor.seconds() - began < 2.0
        assert not wire.received.endswith(b"0\r\n\r\n")
        assert s.said("SHUTDOWN_TIMEOUT")
        await until(lambda: s.host.ollama.active_generations == 0)


@pytest_twisted.ensureDeferred
async def test_at_the_stop_who_was_not_answered_yet_gets_503_before_the_cut() -> None:
    async with running(shutdown_timeout=0.2) as s:
        s.host.ollama.faults.hang("POST /api/chat")
        waiting = s.chat()
        await until(lambda: s.host.ollama.requests_for("POST", "/api/chat"))
        began = reactor.seconds()
        await s.service.stopService()
        assert reactor.seconds() - began < 2.0
        answer = await waiting
        assert answer.status == 503
        assert answer.json()["error"] == "turnstile is shutting down"


@pytest_twisted.ensureDeferred
async def test_at_the_stop_idle_connections_and_sockets_are_closed() -> None:
    async with running() as s:
        idle = await s.wire()
        codes: list[Any] = []

        async def client() -> None:
            async with websockets.connect(f"ws://127.0.0.1:{s.port('comfyui')}/ws") as ws:
                async for _ in ws:
                    pass
                codes.append(ws.close_code)

        done = in_loop(client)
        await until(lambda: s.service.sites["comfyui"].relays)
        await tick(0.05)
        began = reactor.seconds()
        await s.service.stopService()
        assert reactor.seconds() - began < 0.9
        await idle.closed()
        await done
        assert codes == [1001]


@pytest_twisted.ensureDeferred
async def test_a_stop_during_an_image_job_leaves_the_job_alone() -> None:
    async with running() as s:
        prompt_id = await s.queue(sleep_graph(5))
        await s.service.stopService()
        await until(lambda: s.host.comfy.jobs[prompt_id].status == "success")
        assert s.host.comfy.requests_for("POST", "/interrupt") == []


# -- odd upstreams and listeners


def make_certificate(folder: Path, *names: str) -> tuple[Path, Any]:
    """A certificate that vouches for itself: its file, and what a listener needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"turnstile {folder.name}"[:64])])
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    alternatives: list[x509.GeneralName] = [x509.DNSName(n) for n in names if n[0].isalpha()]
    alternatives += [x509.IPAddress(ipaddress.ip_address(n)) for n in names if not n[0].isalpha()]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = folder / "ca.pem"
    file.write_bytes(pem)
    return file, ssl.PrivateCertificate.loadPEM(secret + pem).options()


class QuietProxyFactory(ProxyFactory):
    noisy = False


@pytest_twisted.ensureDeferred
async def test_a_stop_while_comfyui_frees_is_no_doubt_about_the_card() -> None:
    async with running() as s:
        s.host.comfy.faults.hang("POST /free")
        await s.queue()
        await until(lambda: s.host.comfy.requests_for("POST", "/free"))
        await s.service.stopService()
        assert not s.card.history
        assert not s.said("degraded") and not s.said("evicting")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
@pytest_twisted.ensureDeferred
async def test_https_upstreams_with_a_private_ca(tmp_path: Path, name: str) -> None:
    ca, options = make_certificate(tmp_path, "localhost", "127.0.0.1")
    ports: list[Any] = []

    def tls_front(engine: str) -> Any:
        def make(host: GpuHost) -> Upstream:
            factory = QuietProxyFactory("127.0.0.1", getattr(host, engine).port)
            port = reactor.listenSSL(0, factory, options, interface="127.0.0.1")
            ports.append(port)
            return Upstream.parse(f"https://{name}:{port.getHost().port}")

        return make

    # Among others, and with another system's line ends.
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other", "localhost")
    bundle = b"Some words\n" + other.read_bytes() + ca.read_bytes()
    ca.write_bytes(bundle.replace(b"\n", b"\r\n").removesuffix(b"\r\n"))

    async with running(
        ollama_url=tls_front("ollama"),
        comfy_url=tls_front("comfy"),
        upstream_ca=str(ca),
        ports=ports,
    ) as s:
        assert (await s.chat()).status == 200
        prompt_id = await s.queue()
        assert (await s.chat()).status == 200
        assert s.host.comfy.jobs[prompt_id].status == "success"
        state = await s.state()
        assert state["engines"]["comfyui"]["events"] == "open"

        async def client() -> None:
            async with websockets.connect(f"ws://127.0.0.1:{s.port('comfyui')}/ws") as ws:
                assert "status" in str(await ws.recv())

        await in_loop(client)


@pytest_twisted.ensureDeferred
async def test_an_https_upstream_that_nobody_vouches_for_is_not_talked_to(tmp_path: Path) -> None:
    _, options = make_certificate(tmp_path, "localhost")
    (tmp_path / "other").mkdir()
    ca, _ = make_certificate(tmp_path / "other", "localhost")
    ports: list[Any] = []

    def front(host: GpuHost) -> Upstream:
        factory = QuietProxyFactory("127.0.0.1", host.ollama.port)
        ports.append(reactor.listenSSL(0, factory, options, interface="127.0.0.1"))
        return Upstream.parse(f"https://localhost:{ports[0].getHost().port}")

    async with running(ollama_url=front, comfy=False, upstream_ca=str(ca), ports=ports) as s:
        wire = await s.wire()
        wire.send_request("GET", "/api/version")
        await until(lambda: len(s.said("ollama not reached")) > 1)
        assert "certificate" in s.said("ollama not reached")[0].lower()
        assert s.host.ollama.requests_seen == 0
        wire.close()


class StripBase(ProxyServer):
    """Serves the upstream below ``/engines/x``."""

    def dataReceived(self, data: bytes) -> None:
        head, found, rest = data.partition(b" /engines/x/")
        if found:
            data = head + b" /" + rest
        super().dataReceived(data)


@pytest_twisted.ensureDeferred
async def test_upstreams_with_a_base_path() -> None:
    ports: list[Any] = []

    def front(engine: str) -> Any:
        def make(host: GpuHost) -> Upstream:
            factory = QuietProxyFactory("127.0.0.1", getattr(host, engine).port)
            factory.protocol = StripBase
            port = reactor.listenTCP(0, factory, interface="127.0.0.1")
            ports.append(port)
            return Upstream.parse(f"http://127.0.0.1:{port.getHost().port}/engines/x/")

        return make

    async with running(ollama_url=front("ollama"), comfy_url=front("comfy"), ports=ports) as s:
        assert (await s.chat()).status == 200
        prompt_id = await s.queue()
        assert (await s.chat()).status == 200
        assert s.host.comfy.jobs[prompt_id].status == "success"
        assert (await s.state())["engines"]["comfyui"]["events"] == "open"


def blocking_post(url: str, body: Any) -> int:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()
        status: int = response.status
        return status


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest_twisted.ensureDeferred
async def test_upstreams_and_listeners_of_ipv6() -> None:
    def url(engine: str) -> Any:
        return lambda host: Upstream.parse(f"http://[::1]:{getattr(host, engine).port}")

    listen = config.parse_listen("[::1]:0")
    async with running(
        host_options={"interface": "::1"},
        ollama_url=url("ollama"),
        comfy_url=url("comfy"),
        listen_ollama=listen,
        listen_comfy=listen,
    ) as s:
        sent = await in_thread(blocking_post, f"http://[::1]:{s.port()}/api/chat", chat_body())
        assert sent == 200
        record = s.host.ollama.requests_for("POST", "/api/chat")[0]
        assert record.header(b"host") == b"[::1]:%d" % s.host.ollama.port
        assert record.header(b"x-forwarded-for") == b"::1"
        url = f"http://[::1]:{s.port('comfyui')}/prompt"
        assert await in_thread(blocking_post, url, {"prompt": image_graph()}) == 200
        await until(lambda: s.host.comfy.frees)


@pytest_twisted.ensureDeferred
async def test_a_unix_socket_as_listener(tmp_path: Path) -> None:
    path = tmp_path / "ollama.sock"
    async with running(listen_ollama=f"unix:{path}"):

        def call() -> bytes:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(str(path))
                body = json.dumps(chat_body(stream=False)).encode()
                head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                answer = b""
                while piece := sock.recv(65536):
                    answer += piece
                return answer

        assert (await in_thread(call)).startswith(b"HTTP/1.1 200")


# -- pages


@pytest_twisted.ensureDeferred
async def test_pages_are_on_every_listener_and_tell_of_the_card() -> None:
    async with running(listen_ollama_nested="tcp:0:interface=127.0.0.1") as s:
        await s.queue()
        await s.idle()
        for to in ("ollama", "comfyui", "ollama-nested"):
            for path in ("/healthz", "/turnstile/healthz"):
                answer = await s.request("GET", path, to=to)
                assert answer.json() == {"state": "idle", "llm_inflight": 0, "image_pending": False}
            for path in ("/metrics", "/turnstile/metrics"):
                answer = await s.request("GET", path, to=to)
                assert b'gpu_turnstile_state{state="idle"} 1.0' in answer.body
            assert (await s.request("GET", "/turnstile/state", to=to)).status == 200
        total = s.host.card.total_bytes
        assert await s.metric("vram_total_bytes") == total
        assert await s.metric("vram_used_bytes") == 0
        vram = (await s.state())["engines"]["comfyui"]["vram"]
        assert (vram["used"], vram["total"]) == (0, total)


# -- the real program


@asynccontextmanager
async def program(
    folder: Path, *options: str, speed: float = SPEED, **environ: str
) -> AsyncIterator[tuple[Program, GpuHost]]:
    host = GpuHost(reactor, speed)
    await host.start()
    run = Program(
        folder, f"--ollama={host.ollama.url}", f"--comfy={host.comfy.url}", *options, **environ
    )
    try:
        yield run, host
    finally:
        await run.kill()
        await host.stop()
    await until(clean)


SECRETS = ("hunter2", "s3cr3t", "t0k3n", "c00k13", "k3y")


@pytest_twisted.ensureDeferred
async def test_the_program_from_start_to_end(tmp_path: Path) -> None:
    log_file = tmp_path / "turnstile.log"
    async with program(
        tmp_path, "--log-format=json", f"--log-file={log_file}", LOGLEVEL="debug"
    ) as (run, host):
        ollama = await run.port("ollama", log_file)
        comfy = await run.port("comfyui", log_file)
        secret = {"Authorization": "Bearer hunter2", "Cookie": "session=c00k13"}
        code, content = await post(
            ollama, "/api/chat?token=t0k3n&api_key=k3y", chat_body(), **secret
        )
        assert code == 200 and b'"done":true' in content
        extra = {"api_key_comfy_org": "s3cr3t"}
        body = {"prompt": image_graph(), "extra_data": extra}
        code, content = await post(comfy, "/prompt?token=t0k3n", body, **secret)
        assert code == 200
        prompt_id = json.loads(content)["prompt_id"]

        async def socket_client() -> None:
            url = f"ws://127.0.0.1:{comfy}/ws?clientId=x&token=t0k3n"
            async with websockets.connect(url, additional_headers=secret) as ws:
                await ws.recv()

        await in_loop(socket_client)
        code, _ = await post(ollama, "/v1/chat/completions", chat_body(), **secret)
        assert code == 200
        assert host.card.overlaps == []

        # Rotation: the next line goes to a new file.
        log_file.rename(tmp_path / "rotated.log")
        run.process.send_signal(signal.SIGHUP)
        await until(log_file.exists)
        code, _ = await post(ollama, "/api/show", {"model": "llama3.2"})
        await until(lambda: any("/api/show" in line for line in run.lines(log_file)))

        began = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 0
        assert time.monotonic() - began < 3.0

        lines = run.lines(tmp_path / "rotated.log") + run.lines(log_file)
        events = [json.loads(line) for line in lines]
        text = "\n".join(lines + run.lines())
        assert run.lines() == []
        for secret_text in SECRETS:
            assert secret_text not in text, secret_text
        assert turnstile.__version__ in text
        for setting in config.SETTINGS:
            assert any(setting.env in line for line in lines[:80]), setting.env
        assert sum(prompt_id in line for line in lines) >= 3
        assert all(isinstance(event, dict) for event in events)


@pytest_twisted.ensureDeferred
async def test_at_sigterm_a_stream_is_finished_and_what_waits_is_told(tmp_path: Path) -> None:
    async with program(tmp_path, "--loglevel=info", "--shutdown-timeout=8s") as (run, host):
        ollama, comfy = await run.port("ollama"), await run.port("comfyui")
        stream = ensureDeferred(post(ollama, "/api/chat", chat_body(300)))
        await until(lambda: host.ollama.active_generations)
        waiter = ensureDeferred(post(comfy, "/prompt", {"prompt": image_graph()}))
        health = f"http://127.0.0.1:{ollama}/healthz"

        async def pending() -> bool:
            answer = await treq.get(health, agent=AGENT)
            return bool(json.loads(await answer.content())["image_pending"])

        while not await pending():
            await tick(0.01)
        run.process.send_signal(signal.SIGTERM)
        assert (await waiter)[0] == 503
        code, content = await stream
        assert code == 200 and b'"done":true' in content
        assert await run.ended() == 0
        assert any("-->" in line for line in run.lines())


@pytest_twisted.ensureDeferred
async def test_a_taken_port_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Program(tmp_path, "--ollama=http://127.0.0.1:1", LISTEN_OLLAMA=f"127.0.0.1:{port}")
        try:
            assert await run.ended(20.0) != 0
        finally:
            await run.kill()
    (line,) = [line for line in run.lines() if "cannot listen" in line]
    assert str(port) in line and "OLLAMA_HOST" in line and "in use" in line
    assert "Traceback" not in "\n".join(run.lines())


BROKEN = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nothing\n", "no certificate in it"),
        (BROKEN, "certificate 1 can't be read"),
        (None, "No such file or directory"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_ca_file_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_text(content)
    run = Program(tmp_path, "--ollama=https://127.0.0.1:1", f"--upstream-ca={ca}")
    try:
        assert await run.ended(20.0) == 2
    finally:
        await run.kill()
    assert run.lines() == [f"turnstile: UPSTREAM_CA {ca}: {reason}"]


async def does_not_start(folder: Path, *options: str) -> str:
    """Why not: the last line of the log, and the only one about trouble."""
    run = Program(folder, *options)
    try:
        assert await run.ended(20.0) != 0
    finally:
        await run.kill()
    lines = run.lines()
    assert sum("WARN" in line or "ERROR" in line for line in lines) == 1
    assert "Traceback" not in "\n".join(lines)
    return lines[-1]


@pytest.mark.parametrize("descriptor", ["index=0", "name=nobody"])
@pytest_twisted.ensureDeferred
async def test_a_systemd_socket_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, descriptor: str
) -> None:
    line = await does_not_start(
        tmp_path,
        "--ollama=http://127.0.0.1:1",
        f"--listen-ollama=systemd:domain=INET:{descriptor}",
    )
    assert "systemd passed no such socket" in line


@pytest_twisted.ensureDeferred
async def test_unix_sockets_that_cannot_be_had_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        for path, reason in (
            (tmp_path / "taken", "in use"),
            (tmp_path / "file", "in use"),
            (tmp_path / "none" / "s", "No such file or directory"),
        ):
            line = await does_not_start(
                tmp_path, "--ollama=http://127.0.0.1:1", f"--listen-ollama=unix:{path}"
            )
            assert line.endswith(reason)
    assert (tmp_path / "file").read_text() == "precious"


@pytest_twisted.ensureDeferred
async def test_a_unix_socket_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    # Its number belongs to a process that runs: this one.
    (tmp_path / "s.lock").symlink_to(str(os.getpid()))
    run = Program(
        tmp_path, "--ollama=http://127.0.0.1:1", f"--listen-ollama=unix:{path}", "--loglevel=info"
    )

    def answered() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
            except OSError:
                return False
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            return b"idle" in client.recv(1000)

    try:
        await until(lambda: any("listens on" in x or "cannot" in x for x in run.lines()))
        assert await in_thread(answered)
        run.process.terminate()
        assert await run.ended() == 0
    finally:
        await run.kill()


@pytest_twisted.ensureDeferred
async def test_an_engine_url_that_leads_back_to_turnstile_is_told_at_the_start(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # By a way that no look at the settings can tell.
    relay = reactor.listenTCP(0, QuietProxyFactory("127.0.0.1", port), interface="127.0.0.1")
    url = f"http://127.0.0.1:{relay.getHost().port}"
    run = Program(tmp_path, f"--ollama={url}", LISTEN_OLLAMA=f"127.0.0.1:{port}")
    try:
        assert await run.ended(20.0) == 2
    finally:
        await run.kill()
        await relay.stopListening()
    (line,) = [line for line in run.lines() if "ERROR" in line]
    assert f"OLLAMA_URL ({url}) leads back to turnstile itself" in line


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest_twisted.ensureDeferred
async def test_signals_during_the_stop(tmp_path: Path, first: signal.Signals) -> None:
    async with program(tmp_path, "--loglevel=info", "--shutdown-timeout=60s") as (run, host):
        ollama = await run.port("ollama")
        stream = ensureDeferred(post(ollama, "/api/chat", chat_body(100_000)))
        stream.addErrback(lambda _: None)
        await until(lambda: host.ollama.active_generations)
        for number in (signal.SIGHUP, first, signal.SIGHUP, signal.SIGTERM):
            run.process.send_signal(number)
            await tick(0.3)
            assert run.process.poll() is None
        # A person in front of it is in a hurry.
        run.process.send_signal(signal.SIGINT)
        await run.ended(5.0)
        await stream
    text = "\n".join(run.lines())
    assert "answers in progress are cut: interrupted once more" in text
    assert "Traceback" not in text


@pytest_twisted.ensureDeferred
async def test_a_program_whose_engines_are_away_starts_and_stops(tmp_path: Path) -> None:
    run = Program(
        tmp_path, "--ollama=http://127.0.0.1:1", "--comfy=http://127.0.0.1:1", "--loglevel=info"
    )
    try:
        port = await run.port("comfyui")
        answer = await treq.get(f"http://127.0.0.1:{port}/turnstile/state", agent=AGENT)
        assert json.loads(await answer.content())["state"] == "idle"
        for name in ("Ollama", "ComfyUI"):
            await until(lambda name=name: any(f"{name} does not answer" in x for x in run.lines()))
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 0
    finally:
        await run.kill()
    text = "\n".join(run.lines())
    assert "Traceback" not in text
