"""What systemd hears: the messages one by one, and a real twistd that says them."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest
from process_kit import ask, eventually, listening, notify_socket, twistd
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import formatEvent, globalLogPublisher

from turnstile import log as tlog
from turnstile import notify
from turnstile.arbiter import Arbiter, Kind, Tenant
from turnstile.card import Card
from turnstile.notify import Manager, Notifier, Pulse, StatusLine, describe

OLLAMA = Tenant("ollama", Kind.SHARED)
COMFY = Tenant("comfyui", Kind.EXCLUSIVE)


@pytest.fixture
def said() -> Any:
    events: list[Any] = []
    level = tlog._rank
    tlog.set_level("info")
    globalLogPublisher.addObserver(events.append)
    yield lambda text: [line for line in map(formatEvent, events) if text in str(line)]
    globalLogPublisher.removeObserver(events.append)
    tlog._rank = level


# -- what systemd left in the environment


@pytest.mark.parametrize(
    ("environ", "manager"),
    [
        ({}, Manager()),
        ({"NOTIFY_SOCKET": "/run/x"}, Manager("/run/x")),
        ({"NOTIFY_SOCKET": "@x"}, Manager("\0x")),
        ({"NOTIFY_SOCKET": "vsock:2:3"}, Manager()),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000"}, Manager("/x", 30.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7"}, Manager("/x", 1e-6)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "8"}, Manager("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"}, Manager("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "-5"}, Manager("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, Manager("/x")),
        ({"WATCHDOG_USEC": "30000000"}, Manager()),
    ],
)
def test_the_environment_is_read_and_cleared(environ: dict[str, str], manager: Manager) -> None:
    environ = {**environ, "HOME": "/"}
    assert notify.take_environment(environ, 7) == manager
    assert environ == {"HOME": "/"}


# -- messages


@pytest.fixture
def heard(tmp_path: Path) -> Any:
    with notify_socket(str(tmp_path / "notify")) as sock:
        yield sock


def test_messages(heard: Any) -> None:
    notifier = Notifier(Clock(), heard.address, monotonic=lambda: 12345)
    assert notifier.enabled
    notifier.ready("idle")
    notifier.status("two\nlines")
    notifier.reloading()
    notifier.beat()
    notifier.stopping("stopping", 10.0)
    notifier.close()
    notifier.status("after the end")
    assert heard.drain() == [
        {"READY": "1", "STATUS": "idle"},
        {"STATUS": "two lines"},
        {"RELOADING": "1", "MONOTONIC_USEC": "12345"},
        {"WATCHDOG": "1"},
        {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "25000000", "STATUS": "stopping"},
    ]


def test_the_monotonic_clock_is_systemds(heard: Any) -> None:
    notifier = Notifier(Clock(), heard.address)
    notifier.reloading()
    notifier.close()
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    (message,) = heard.drain()
    # The two differ by the time of suspends only; what counts is the unit.
    assert 0 < int(message["MONOTONIC_USEC"]) / 1e6 < uptime + 60


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier(Clock(), None)
    assert not notifier.enabled
    notifier.ready("idle")
    notifier.beat()
    notifier.stopping("", 1.0)
    notifier.close()


def test_a_socket_that_is_gone_is_told_once(tmp_path: Path, said: Any) -> None:
    notifier = Notifier(Clock(), str(tmp_path / "nobody"))
    for _ in range(3):
        notifier.status("x")
    notifier.close()
    assert len(said("systemd can't be told: No such file or directory")) == 1


def test_a_systemd_that_is_slow_to_read_is_not_waited_for(heard: Any) -> None:
    clock = Clock()
    notifier = Notifier(clock, heard.address)
    sent = 0
    while not clock.getDelayedCalls():  # until its queue is full
        notifier.status(str(sent))
        sent += 1
        assert sent < 10_000
    notifier.beat()
    notifier.ready("late")
    read = heard.drain()
    clock.advance(notify.RETRY_AFTER)
    read += heard.drain()
    assert [message["STATUS"] for message in read] == [*map(str, range(sent)), "late"]
    assert clock.getDelayedCalls() == []
    notifier.beat()
    assert heard.drain() == [{"WATCHDOG": "1"}]
    notifier.close()


# -- the status line


def test_the_line_for_every_state() -> None:
    clock = Clock()
    arbiter, card = Arbiter(clock), Card(clock)

    class Engine:
        def __init__(self, tenant: Tenant) -> None:
            self.tenant = tenant

        def evict(self) -> Any:
            raise AssertionError

    for tenant in (OLLAMA, COMFY):
        card.register(Engine(tenant), resident=False)  # type: ignore[arg-type]
    resume = arbiter.hold()
    assert describe(arbiter, card) == "looking at the engines"
    resume()
    assert describe(arbiter, card) == "idle"
    chat = arbiter.try_acquire(OLLAMA)
    assert chat is not None
    card.mark_resident("ollama")
    assert describe(arbiter, card) == "llm: 1 request of ollama"
    more = arbiter.try_acquire(OLLAMA)
    assert more is not None
    for _ in range(2):
        arbiter.acquire(COMFY).addErrback(lambda _: None)
    arbiter.acquire(OLLAMA).addErrback(lambda _: None)
    assert describe(arbiter, card) == "llm: 2 requests of ollama; waiting: 2 image, 1 llm"
    chat.release()
    more.release()
    assert describe(arbiter, card) == "image: a job of comfyui; waiting: 1 image, 1 llm"
    card.degrade("ollama", "did not leave")
    assert describe(arbiter, card).endswith("; degraded: ollama: did not leave")
    arbiter.close()
    for lease in arbiter.leases:
        lease.release()


def test_an_idle_card_says_whose_memory_may_be_on_it() -> None:
    clock = Clock()
    arbiter, card = Arbiter(clock), Card(clock)

    class Engine:
        tenant = OLLAMA

    card.register(Engine())  # type: ignore[arg-type]
    assert describe(arbiter, card) == "idle (ollama may hold memory)"


def test_changes_are_told_at_once_and_then_at_most_once_a_second(heard: Any) -> None:
    clock = Clock()
    arbiter = Arbiter(clock)
    notifier = Notifier(clock, heard.address)
    line = StatusLine(clock, notifier, arbiter, Card(clock))
    notifier.ready(line.text())
    assert heard.drain() == [{"READY": "1", "STATUS": "idle"}]
    clock.advance(5.0)
    leases = [arbiter.try_acquire(OLLAMA) for _ in range(1000)]
    clock.advance(0)
    assert heard.drain() == [{"STATUS": "llm: 1000 requests of ollama"}]
    for lease in leases[:-1]:
        assert lease is not None
        lease.release()
        clock.advance(0.0005)
    assert heard.drain() == []
    clock.advance(1.0)
    assert heard.drain() == [{"STATUS": "llm: 1 request of ollama"}]
    last = leases[-1]
    assert last is not None
    last.release()
    arbiter.try_acquire(OLLAMA)
    clock.advance(1.0)
    assert heard.drain() == []  # the same as before
    assert clock.getDelayedCalls() == []
    arbiter.try_acquire(OLLAMA)
    line.stop()
    line.changed()
    assert clock.getDelayedCalls() == []
    notifier.close()


# -- signs of life


class Patient:
    """A pulse, and the reactor that it depends on."""

    def __init__(self, timeout: float = 3.0) -> None:
        self.reactor = MemoryReactorClock()
        self.beats = 0
        self.ailment = ""
        self.pulse = Pulse(self.reactor, timeout, self._beat, lambda: self.ailment)

    def _beat(self) -> None:
        self.beats += 1

    def read(self) -> None:
        """What the reactor does with a socket that has input."""
        for reader in list(self.reactor.readers):
            reader.doRead()


def test_the_pulse() -> None:
    patient = Patient()
    patient.pulse.start()
    patient.read()
    assert patient.beats == 1
    for _ in range(5):
        patient.reactor.advance(1.0)
        patient.read()
    assert patient.beats == 6
    patient.pulse.stop()
    assert list(patient.reactor.readers) == []
    assert patient.reactor.getDelayedCalls() == []
    patient.pulse.stop()


def test_a_reactor_that_reads_nothing_gives_no_sign() -> None:
    patient = Patient()
    patient.pulse.start()
    for _ in range(1000):
        patient.reactor.advance(1.0)
    assert patient.beats == 0
    patient.read()
    assert patient.beats == 1
    patient.pulse.stop()


def test_a_reactor_whose_timers_do_not_run_gives_no_sign() -> None:
    patient = Patient()
    patient.pulse.start()
    for _ in range(1):
        patient.read()
    with_input = [r for r in patient.reactor.readers if _has_input(r.fileno())]
    assert patient.beats == 1 and with_input == []
    patient.pulse.stop()


def _has_input(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        try:
            return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


def test_an_ailing_service_gives_no_sign(said: Any) -> None:
    patient = Patient()
    patient.pulse.start()
    patient.ailment = "ollama does not listen any more"
    for _ in range(3):
        patient.reactor.advance(1.0)
        patient.read()
    assert patient.beats == 0
    assert len(said("no signs of life to systemd any more: ollama does not listen")) == 1
    patient.ailment = ""
    patient.read()
    assert patient.beats == 1
    patient.pulse.stop()


def test_a_reactor_that_stood_still_is_told(said: Any) -> None:
    patient = Patient()
    patient.pulse.start()
    patient.reactor.advance(1.5)
    assert said("stood still") == []
    patient.reactor.advance(2.9)
    (line,) = said("stood still")
    assert line == "the reactor stood still for 1.9 s (the watchdog ends it after 3 s)"
    patient.pulse.stop()


# -- a real twistd

#: SIGUSR1 has the reactor call something that does not return until a file is there.
WEDGE = """
import signal, time
def wedge():
    open("wedged", "w").close()
    while not os.path.exists("go on"):
        time.sleep(0.01)
def on_signal(*_):
    from twisted.internet import reactor
    reactor.callFromThread(wedge)
signal.signal(signal.SIGUSR1, on_signal)
"""
#: SIGUSR2 writes down what a child would see.
CHILD = """
import signal, subprocess
def on_child(*_):
    with open("child", "w") as file:
        subprocess.run(["sh", "-c", "env; ls -l /proc/self/fd; echo done"], stdout=file, close_fds=False)
signal.signal(signal.SIGUSR2, on_child)
"""
ENGINE = ("--ollama=http://127.0.0.1:1", "--config=/dev/null")


@pytest.mark.parametrize("abstract", [False, True])
def test_from_start_to_stop(tmp_path: Path, abstract: bool) -> None:
    address = f"@turnstile-test-{uuid.uuid4().hex}" if abstract else str(tmp_path / "notify")
    with (
        notify_socket(address) as heard,
        listening() as sock,
        twistd(
            tmp_path,
            *ENGINE,
            "--shutdown-timeout=3s",
            notify=heard,
            sockets=[sock],
            names=["ollama"],
            inside=CHILD,
            environ={"WATCHDOG_USEC": "600000"},
        ) as run,
    ):
        first = heard.next()
        assert first is not None and first["READY"] == "1", first
        # It is true: the listener is open.
        assert ask(sock.getsockname())[0] == 200
        heard.until(STATUS="idle (ollama may hold memory)")
        for _ in range(3):
            heard.until(WATCHDOG="1")
        run.send(signal.SIGHUP)
        message = heard.until(RELOADING="1")
        assert int(message["MONOTONIC_USEC"]) > 0
        heard.until(READY="1")
        run.until_said("no change")

        run.send(signal.SIGUSR2)
        child = tmp_path / "child"
        eventually(lambda: child.exists() and "done" in child.read_text(), "the child")
        text = child.read_text()
        for name in ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            assert name not in text, name
        assert "PATH=" in text and "socket:" not in text

        run.send(signal.SIGTERM)
        message = heard.until(STOPPING="1")
        assert message["EXTEND_TIMEOUT_USEC"] == "18000000"
        assert run.ended() == 0
        assert all("READY" not in later for later in heard.drain())


def test_a_wedged_reactor_misses_its_pings(tmp_path: Path) -> None:
    with (
        notify_socket(str(tmp_path / "notify")) as heard,
        twistd(
            tmp_path,
            *ENGINE,
            "--listen-ollama=127.0.0.1:0",
            notify=heard,
            inside=WEDGE,
            environ={"WATCHDOG_USEC": "300000"},
        ) as run,
    ):
        heard.until(WATCHDOG="1")
        run.send(signal.SIGUSR1)
        eventually((tmp_path / "wedged").exists, "the wedge")
        heard.drain()
        # Ten times the pause between two.
        assert heard.next(1.0) is None
        (tmp_path / "go on").touch()
        heard.until(WATCHDOG="1")
        run.until_said("the reactor stood still for")
        assert run.stop() == 0


def test_one_that_cannot_start_is_never_ready(tmp_path: Path) -> None:
    with (
        notify_socket(str(tmp_path / "notify")) as heard,
        listening() as taken,
        twistd(
            tmp_path,
            *ENGINE,
            f"--listen-ollama=127.0.0.1:{taken.getsockname()[1]}",
            notify=heard,
        ) as run,
    ):
        assert run.ended() == 1
        assert all("READY" not in message for message in heard.drain())
    assert len(run.said("cannot listen for ollama")) == 1
    assert run.said("Traceback") == []
