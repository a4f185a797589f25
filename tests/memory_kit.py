"""Measure how much memory a real turnstile process takes while gigabytes go through it.

    script/check-memory [--bytes N] [--limit-mib N]

Starts the simulated engines and ``twistd -n turnstile`` in front of them, sends and fetches with curl, and reads the
resident memory from /proc. Exits 0 if no transfer made it grow by the limit or more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
DIGEST = "sha256:" + "0" * 64


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def memory(pid: int, field: str = "VmRSS") -> int:
    """Bytes: resident now, or with ``VmHWM`` at most so far."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 30.0) -> float:
    """Seconds until somebody listens on ``port``."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return time.monotonic() - began
        time.sleep(0.01)
    raise RuntimeError(f"nobody listens on port {port}")


class Peak:
    """The most memory that a process has while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self.before = self.most = 0

    def __enter__(self) -> Peak:
        self.before = self.most = memory(self._pid)
        # The kernel's own high-water mark misses nothing; where it cannot be set back, looking often has to do.
        try:
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")
            self._exact = True
        except OSError:
            self._exact = False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, memory(self._pid))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._exact:
            self.most = max(self.most, memory(self._pid, "VmHWM"))

    @property
    def growth(self) -> int:
        return self.most - self.before


class Bench:
    """Engines, a turnstile, and transfers through it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.pid = 0
        self.listening_after = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[Bench]:
        ollama, comfy = free_port(), free_port()
        try:
            sim = self._start(
                "-m", "turnstile.sim", "--ollama-port", str(ollama), "--comfy-port", str(comfy)
            )
            wait_for(comfy, sim)
            began = time.monotonic()
            turnstile = self._start(
                str(Path(sys.executable).parent / "twistd"),
                "-n",
                "--pidfile=",
                "turnstile",
                "--ollama",
                f"http://127.0.0.1:{ollama}",
                "--comfy",
                f"http://127.0.0.1:{comfy}",
                "--listen-ollama",
                f"tcp:{self.port}:interface=127.0.0.1",
                "--listen-comfy",
                f"tcp:{free_port()}:interface=127.0.0.1",
            )
            self.pid = turnstile.pid
            wait_for(self.port, turnstile)
            self.listening_after = time.monotonic() - began
            # The first requests make what stays: connections, compiled expressions, metrics.
            for _ in range(20):
                with urllib.request.urlopen(self._url("/api/tags")) as answer:
                    answer.read()
            self.transfer("upload", 8 * MIB)
            self.transfer("download", 8 * MIB)
            time.sleep(0.5)
            yield self
        finally:
            for process in reversed(self._processes):
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(15.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GPU_TURNSTILE")}
        environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
        log = (self.folder / f"{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environ, stdout=log, stderr=subprocess.STDOUT
        )
        log.close()
        self._processes.append(process)
        return process

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def transfer(self, kind: str, size: int) -> None:
        """One transfer of ``size`` bytes, checked to have come through whole."""
        blob = self._url(f"/api/blobs/{DIGEST}")
        if kind == "upload":
            sparse = self.folder / "sparse"
            with sparse.open("wb") as file:
                file.truncate(size)
            self._curl(size, "size_upload", "201", "-X", "POST", "-T", str(sparse), blob)
        elif kind == "upload, chunked":
            zeros = subprocess.Popen(["head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE)
            with zeros:
                self._curl(
                    size, "size_upload", "201", "-X", "POST", "-T", "-", blob, stdin=zeros.stdout
                )
        elif kind == "download":
            self._curl(size, "size_download", "200", self._url(f"/sim/download?bytes={size}"))
        elif kind == "download, chunked":
            url = self._url(f"/sim/download?bytes={size}&chunked=1")
            self._curl(size, "size_download", "200", url)
        else:
            self._stalled(size)

    def _curl(self, size: int, what: str, status: str, *arguments: str, stdin: Any = None) -> None:
        done = subprocess.run(
            ["curl", "-sS", "-o", os.devnull, "-w", "%{http_code} %{" + what + "}", *arguments],
            stdin=stdin,
            capture_output=True,
            text=True,
        )
        got = done.stdout.split()
        # Where the framing is chunked, some versions of curl count it in.
        if done.returncode or got[0] != status or not size <= int(got[1]) <= size * 1.01 + 1000:
            raise RuntimeError(f"curl {arguments}: {done.returncode} {done.stdout} {done.stderr}")

    def _stalled(self, size: int) -> None:
        """A client that asks for much and reads nothing."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(
                f"GET /sim/download?bytes={size} HTTP/1.1\r\nHost: x.local\r\n\r\n".encode()
            )
            time.sleep(3.0)


TRANSFERS = ("upload", "upload, chunked", "download", "download, chunked", "download, nobody reads")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="script/check-memory", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--bytes", type=int, default=2 << 30, help="size of a transfer (2 GiB)")
    parser.add_argument("--limit-mib", type=float, default=32.0, help="growth that fails (32)")
    options = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)).running() as bench:
        print(f"listening after {bench.listening_after:.2f} s")
        print(f"resident, idle: {memory(bench.pid) / MIB:.1f} MiB")
        for kind in TRANSFERS:
            began = time.monotonic()
            with Peak(bench.pid) as peak:
                bench.transfer(kind, options.bytes)
            took = time.monotonic() - began
            worst = max(worst, peak.growth)
            print(
                f"{kind:22} {options.bytes / MIB:.0f} MiB in {took:5.1f} s: resident"
                f" {peak.before / MIB:.1f} MiB before, {peak.most / MIB:.1f} at most,"
                f" {memory(bench.pid) / MIB:.1f} after: grew by {peak.growth / MIB:.1f}",
                flush=True,
            )
    fine = worst < options.limit_mib * MIB
    print(
        f"{'ok' if fine else 'FAILED'}: grew by {worst / MIB:.1f} MiB, limit {options.limit_mib:g}"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
