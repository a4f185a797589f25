"""The health check of containers finds the listener that the configuration means."""

import http.server
import socket
import threading

import pytest

from turnstile import healthcheck
from turnstile.config import load
from turnstile.healthcheck import Unhealthy

OLLAMA = "http://192.0.2.1:11434"


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({"OLLAMA_URL": OLLAMA}, ("127.0.0.1", 11434, False)),
        ({"COMFY_URL": OLLAMA}, ("127.0.0.1", 8188, False)),
        ({"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": "192.0.2.7:1234"}, ("192.0.2.7", 1234, False)),
        ({"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": "[::]:1234"}, ("::1", 1234, False)),
        ({"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": "tcp6:1234"}, ("::1", 1234, False)),
        (
            {"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": "unix:/run/x", "COMFY_URL": OLLAMA},
            ("127.0.0.1", 8188, False),
        ),
    ],
)
def test_where_it_asks(environ, expected):
    assert healthcheck.place(load({}, environ, "/nonexistent")) == expected


def test_no_port_at_all():
    config = load({}, {"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": "unix:/run/x"}, "/nonexistent")
    with pytest.raises(Unhealthy, match="no listener has a TCP port"):
        healthcheck.place(config)


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        status = 200
        asked = []

        def do_GET(self):
            self.asked.append(self.path)
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_healthy_and_not(server):
    port = server.server_address[1]
    environ = {"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": f"127.0.0.1:{port}"}
    healthcheck.check(environ)
    assert server.RequestHandlerClass.asked == ["/turnstile/healthz"]
    server.RequestHandlerClass.status = 503
    with pytest.raises(Unhealthy, match=f"127.0.0.1 port {port}: status 503"):
        healthcheck.check(environ)


def test_nobody_there(server):
    # A port of this machine that is bound and not listened on by anybody.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        environ = {"OLLAMA_URL": OLLAMA, "LISTEN_OLLAMA": f"127.0.0.1:{bound.getsockname()[1]}"}
        with pytest.raises(Unhealthy, match="Connection refused"):
            healthcheck.check(environ)


def test_a_configuration_that_cannot_be_used(monkeypatch):
    with pytest.raises(Unhealthy, match="no engine"):
        healthcheck.check({})
    monkeypatch.setattr(healthcheck.os, "environ", {})
    with pytest.raises(SystemExit, match="turnstile: no engine"):
        healthcheck.main()
