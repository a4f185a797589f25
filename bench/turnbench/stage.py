"""The contestants: the upstream itself, the references and turnstile, side by side on ports of their own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from turnbench.procs import Process, free_port
from turnbench.tools import BUILD, ROOT, find

NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr crit;
worker_processes auto;
worker_rlimit_nofile 65536;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    upstream engine {{
        server 127.0.0.1:{upstream};
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    map $http_upgrade $connection_field {{ default upgrade; '' ''; }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection $connection_field;
            proxy_set_header Upgrade $http_upgrade;
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""

HAPROXY = """
global
    maxconn 8192
defaults
    mode http
    timeout connect 10s
    timeout client 1h
    timeout server 1h
    option http-keep-alive
    http-reuse always
frontend in
    bind 127.0.0.1:{port} backlog 1024
    default_backend engine
backend engine
    server one 127.0.0.1:{upstream}
"""


class Contestant:
    """Something that answers on a port."""

    def __init__(self, name: str, process: Process, port: int, comfy_port: int = 0) -> None:
        self.name = name
        self.process = process
        self.port = port
        #: Where ComfyUI is found through it.
        self.comfy_port = comfy_port or port

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def comfy_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.comfy_port}{path}"


class Stage:
    """Starts things, and ends them all when it is left.

    :ivar contestants: by name; ``direct`` is the upstream itself.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self._count = 0
        self.contestants: dict[str, Contestant] = {}

    def start(self, argv: list[str], port: int, **environ: str) -> Process:
        """A process of ours that listens on ``port``."""
        process = self.start_only(argv, **environ)
        process.wait_for(port)
        return process

    def start_only(self, argv: list[str], **environ: str) -> Process:
        """A process of ours."""
        self._count += 1
        env = {
            key: value
            for key, value in os.environ.items()
            # An installed turnstile has its bytecode beside it.
            if not key.startswith(("GPU_TURNSTILE", "NOTIFY_", "LISTEN_", "PYTHONDONTWRITE"))
        }
        log = self.folder / f"{self._count}.log"
        process = Process(argv, log, env={**env, **environ})
        self._stack.callback(process.stop)
        return process

    def start_turnstile(
        self, ollama_port: int, comfy_port: int, *options: str
    ) -> tuple[Process, int, int]:
        """A turnstile, started but not waited for, and its two ports."""
        port, other = free_port(), free_port()
        argv = [
            str(Path(sys.executable).parent / "twistd"),
            "--nodaemon",
            "--pidfile=",
            "turnstile",
            f"--ollama=http://127.0.0.1:{ollama_port}",
            f"--comfy=http://127.0.0.1:{comfy_port}",
            f"--listen-ollama=127.0.0.1:{port}",
            f"--listen-comfy=127.0.0.1:{other}",
            *options,
        ]
        return self.start_only([sys.executable, *argv], PYTHONPATH=str(ROOT)), port, other

    def add_all(self) -> None:
        """Start the upstream and everything that is to be compared."""
        upstream = free_port()
        address = f"127.0.0.1:{upstream}"
        process = self.start([f"{BUILD}/upstream", address], upstream)
        self._add("direct", process, upstream)
        port = free_port()
        argv = [f"{BUILD}/proxy", f"127.0.0.1:{port}", f"http://{address}"]
        self._add("go", self.start(argv, port), port)
        nginx, haproxy = find("nginx"), find("haproxy")
        if nginx is not None:
            port = free_port()
            config = self._write("nginx.conf", NGINX, port, upstream)
            argv = [nginx, "-p", str(self.folder), "-c", str(config), "-e", "stderr"]
            self._add("nginx", self.start(argv, port), port)
        if haproxy is not None:
            port = free_port()
            config = self._write("haproxy.cfg", HAPROXY, port, upstream)
            self._add("haproxy", self.start([haproxy, "-db", "-f", str(config)], port), port)
        process, port, other = self.start_turnstile(upstream, upstream)
        process.wait_for(port)
        process.wait_for(other)
        self._add("turnstile", process, port, other)

    def _write(self, name: str, text: str, port: int, upstream: int) -> Path:
        path = self.folder / name
        path.write_text(text.format(port=port, upstream=upstream, folder=self.folder))
        return path

    def _add(self, name: str, process: Process, port: int, comfy_port: int = 0) -> None:
        self.contestants[name] = Contestant(name, process, port, comfy_port)


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A stage with nothing on it, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="turnbench-") as folder, ExitStack() as stack:
        yield Stage(stack, Path(folder))
