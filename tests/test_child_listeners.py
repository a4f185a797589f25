"""Who listens on a port: a process of ours, one of a child's group, one that is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from child_kit import until

from turnstile.child import listeners
from turnstile.child.listeners import Listener, listeners_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

#: Listens, prints the port and waits; by a child of its own in another session, if asked.
PROGRAM = """
import os, socket, sys, time
if sys.argv[1] == "deep" and os.fork():
    time.sleep(600)
if sys.argv[1] == "deep":
    os.setsid()
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_of_this_process(family: socket.AddressFamily) -> None:
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("no IPv6")
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(str(error))
    with server:
        port = server.getsockname()[1]
        (found,) = listeners_on(port)
        assert found.pid == os.getpid() and str(found).endswith(f"(pid {os.getpid()})")
        assert "python" in found.command or "pytest" in found.command
        assert listeners_on(port, os.getpid()) == []
    assert listeners_on(port) == []


def test_who_is_only_connected_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        assert len(listeners_on(port)) == 1
    with client, accepted:
        assert listeners_on(port) == []


@pytest.mark.parametrize("depth", ["flat", "deep"])
def test_a_socket_of_a_childs_group(depth: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, depth],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        (found,) = listeners_on(port)
        assert (found.pid == child.pid) is (depth == "flat")
        assert listeners_on(port, child.pid) == [] and listeners_on(port, other.pid) == [found]
    finally:
        for pid in {found.pid, child.pid, other.pid}:
            os.kill(pid, 9)
        assert child.stdout is not None
        child.stdout.close()
        child.wait()
        other.wait()
    until(lambda: not listeners_on(port), "the end of the listener")


def test_nothing_is_known_where_nobody_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_PROC", "/no/such/place")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners_on(server.getsockname()[1]) == []
    assert str(Listener(1, "x")) == "x (pid 1)"
