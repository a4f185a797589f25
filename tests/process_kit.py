"""Real twistd processes, started as systemd starts them: with a notify socket and inherited listening sockets."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import turnstile
from turnstile import config

ROOT = Path(turnstile.__file__).parent.parent
#: Seconds after which something counts as never coming.
PATIENCE = 30.0

#: Puts the passed descriptors where systemd puts them, and runs twistd; what the test wants to happen in there comes
#: before.
_LAUNCHER = """
import os, sys
given = [int(fd) for fd in os.environ.pop("TEST_FDS", "").split(",") if fd]
high = []
free = max([100, *given]) + 1
for fd in given:
    high.append(os.dup2(fd, free + len(high)))
for fd in given:
    os.close(fd)
for index, fd in enumerate(high):
    os.dup2(fd, 3 + index)
    os.set_inheritable(3 + index, True)
    os.close(fd)
%s
from twisted.scripts.twistd import run
sys.argv = ["twistd", *sys.argv[1:]]
sys.exit(run())
"""
#: Tells the process its own number before it becomes it.
_AS_SYSTEMD = ("sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh")


def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for ``condition``; returns what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"it never came true: {what}")
        time.sleep(0.01)


class NotifySocket:
    """What systemd would hear."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def next(self, seconds: float = PATIENCE) -> dict[str, str] | None:
        """The next message; ``None`` if none comes in time."""
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return None
        return dict(line.split("=", 1) for line in data.decode().split("\n"))

    def until(self, **wanted: str) -> dict[str, str]:
        """The next message that has these fields; others are thrown away."""
        deadline = time.monotonic() + PATIENCE
        seen = []
        while (left := deadline - time.monotonic()) > 0:
            message = self.next(left)
            if message is not None:
                seen.append(message)
                if all(message.get(name) == value for name, value in wanted.items()):
                    return message
        raise AssertionError(f"nothing with {wanted} came, but {seen[-20:]}")

    def drain(self) -> list[dict[str, str]]:
        """What has come already."""
        found = []
        while (message := self.next(0.001)) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        self._socket.close()


class Twistd:
    """A twistd of its own.

    :param sockets: listening sockets to inherit, with their names; ``None`` instead of names: none are told.
    :param inside: Python that the process runs before twistd.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        notify: NotifySocket | None = None,
        sockets: Sequence[socket.socket] = (),
        names: Sequence[str] | None = None,
        inside: str = "",
        environ: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        ours = {name for setting in config.SETTINGS for name in (setting.env, *setting.env_aliases)}
        env = {name: value for name, value in os.environ.items() if name not in ours}
        env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        if notify is not None:
            env["NOTIFY_SOCKET"] = notify.address
        if sockets:
            env["LISTEN_FDS"] = str(len(sockets))
            env["TEST_FDS"] = ",".join(str(sock.fileno()) for sock in sockets)
            if names is not None:
                env["LISTEN_FDNAMES"] = ":".join(names)
        env |= environ or {}
        self.log = folder / "stderr.txt"
        program = [*python, "-c", _LAUNCHER % inside, "-n", "--pidfile=", "turnstile", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*(_AS_SYSTEMD if sockets else ()), *program],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sock.fileno() for sock in sockets],
            )

    def lines(self) -> list[str]:
        """The log so far."""
        return self.log.read_text().splitlines()

    def said(self, text: str) -> list[str]:
        """The lines that hold ``text``."""
        return [line for line in self.lines() if text in line]

    def until_said(self, text: str) -> str:
        """Wait for such a line."""

        def look() -> Any:
            found = self.said(text)
            assert found or self.process.poll() is None, self.lines()
            return found

        line: str = eventually(look, f"{text!r} in the log")[0]
        return line

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.send(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)


@contextmanager
def twistd(folder: Path, *options: str, **more: Any) -> Iterator[Twistd]:
    run = Twistd(folder, *options, **more)
    try:
        yield run
    finally:
        run.kill()


@contextmanager
def notify_socket(address: str) -> Iterator[NotifySocket]:
    sock = NotifySocket(address)
    try:
        yield sock
    finally:
        sock.close()


def listening(host: str = "127.0.0.1", backlog: int = 128) -> socket.socket:
    """A socket like one of systemd's, at a port that the kernel picked."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind((host, 0))
    sock.listen(backlog)
    return sock


def listening_unix(path: str) -> socket.socket:
    """The same as a unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen(128)
    return sock


class Client:
    """A blocking client's connection."""

    def __init__(self, address: Any) -> None:
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(PATIENCE)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address[:2], PATIENCE)

    def send(self, path: str = "/healthz", method: str = "GET", body: bytes = b"") -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n"
        if body:
            head += f"Content-Length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"\r\n" + body)

    def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; status 0: the connection ended without one."""
        data = b""
        while b"\r\n\r\n" not in data:
            try:
                piece = self.socket.recv(65536)
            except ConnectionError:
                piece = b""
            if not piece:
                return 0, data
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        while len(body) < length:
            body += self.socket.recv(65536)
        return int(head.split()[1]), body

    def is_open(self, seconds: float) -> bool:
        """Whether the other side neither ends the connection nor says anything for so long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return not selector.select(seconds)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(address: Any, path: str = "/healthz", method: str = "GET") -> tuple[int, bytes]:
    """One request of a connection of its own."""
    with Client(address) as client:
        client.send(path, method)
        return client.answer()
