"""The rows without a reference: what only turnstile does, and what it costs while it does nothing."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import statistics
import struct
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from turnbench.procs import MIB, free_port
from turnbench.rows import CHAT, Figures, Scale
from turnbench.stage import Stage, open_stage
from turnbench.tools import ROOT
from turnstile.sim.graphs import image_graph, sleep_graph

#: Simulated seconds a second: unloading takes 60 ms, freeing 20 ms, loading 400 ms.
SPEED = 5.0
#: Seconds between two looks of the driver that knows what to look for.
LOOK = 0.001
WAITING = 1000
VANISHING = 100
TIMEOUT = 60.0


def _call(port: int, path: str, payload: object = None) -> Any:
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        body = answer.read()
    return json.loads(body) if body.strip() else None


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("bench: what was waited for did not come")
        time.sleep(LOOK)


def _simulator(stage: Stage, speed: float) -> tuple[int, int]:
    ollama, comfy = free_port(), free_port()
    argv = [sys.executable, "-m", "turnstile.sim", f"--speed={speed}"]
    argv += [f"--ollama-port={ollama}", f"--comfy-port={comfy}"]
    process = stage.start(argv, ollama, PYTHONPATH=str(ROOT))
    process.wait_for(comfy)
    return ollama, comfy


def _chat(port: int) -> None:
    options = {"num_predict": 2}
    _call(port, "/api/chat", {**json.loads(CHAT), "options": options})


def _is_in_history(comfy: int, prompt_id: str) -> bool:
    return prompt_id in _call(comfy, f"/history/{prompt_id}")


def _held(comfy: int) -> int:
    held: int = _call(comfy, "/system_stats")["devices"][0]["torch_vram_total"]
    return held


def _by_hand(ollama: int, comfy: int) -> float:
    """Seconds of chat -> image -> chat by a driver that asks the engines themselves, every millisecond."""
    began = time.monotonic()
    _chat(ollama)
    _call(ollama, "/api/generate", {"model": "llama3.2", "keep_alive": 0, "stream": False})
    _until(lambda: not _call(ollama, "/api/ps")["models"])
    prompt_id = _call(comfy, "/prompt", {"prompt": image_graph(2)})["prompt_id"]
    _until(lambda: _is_in_history(comfy, prompt_id))
    _call(comfy, "/free", {"unload_models": True, "free_memory": True})
    _until(lambda: not _held(comfy))
    _chat(ollama)
    return time.monotonic() - began


def _by_turnstile(ollama: int, comfy: int) -> float:
    """The same through turnstile: the requests are sent, the rest is its affair."""
    began = time.monotonic()
    _chat(ollama)
    _call(comfy, "/prompt", {"prompt": image_graph(2)})
    _chat(ollama)
    return time.monotonic() - began


def switches(_: Stage, scale: Scale) -> Figures:
    """Row 7: what turnstile adds to chat -> image -> chat, beyond the engines' own time."""
    with open_stage() as stage:
        # One of its own for the driver: turnstile would take its jobs for somebody else's, and see to them.
        other_ollama, other_comfy = _simulator(stage, SPEED)
        ollama, comfy = _simulator(stage, SPEED)
        process, port, other = stage.start_turnstile(ollama, comfy)
        process.wait_for(port)
        process.wait_for(other)
        by_hand, by_turnstile = [], []
        _by_hand(other_ollama, other_comfy)
        _by_turnstile(port, other)
        for _ in range(scale.switches):
            by_hand.append(_by_hand(other_ollama, other_comfy))
            by_turnstile.append(_by_turnstile(port, other))
    own = statistics.median(by_hand)
    added = statistics.median(by_turnstile) - own
    return {"turnstile": {"own_ms": own * 1e3, "added_ms": added * 1e3}}


class _Waiters:
    """Clients that sent a chat request and wait for its answer."""

    def __init__(self, port: int, count: int) -> None:
        body = CHAT.encode()
        head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        self._sockets = []
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(request)
            self._sockets.append(sock)

    def vanish(self, count: int) -> None:
        """So many reset their connections."""
        for sock in self._sockets[:count]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        del self._sockets[:count]

    def drain(self) -> float:
        """Wait for all to be answered; the seconds from the first answer to the last."""
        first = 0.0
        with selectors.DefaultSelector() as selector:
            for sock in self._sockets:
                selector.register(sock, selectors.EVENT_READ)
            left = len(self._sockets)
            while left:
                for key, _ in selector.select(TIMEOUT) or [(None, 0)]:
                    if key is None:
                        raise SystemExit(f"bench: {left} waiting requests were not answered")
                    sock: Any = key.fileobj
                    data = sock.recv(65536)
                    if not data.startswith(b"HTTP/1.1 200 "):
                        raise SystemExit(f"bench: a waiting request was answered {data[:80]!r}")
                    first = first or time.monotonic()
                    selector.unregister(sock)
                    sock.close()
                    left -= 1
        return time.monotonic() - first


def _lines(port: int) -> int:
    """How many requests wait, by the state page."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT).read()
    for line in text.decode().splitlines():
        if line.startswith('gpu_turnstile_waiting{kind="llm"}'):
            return int(float(line.split()[-1]))
    raise SystemExit("bench: no gpu_turnstile_waiting in the metrics")


def waiters(stage: Stage, scale: Scale) -> Figures:
    """Row 8: 1,000 chat requests behind an image job: memory, CPU, time to drain; 100 of them vanish at once."""
    upstream = stage.contestants["direct"]
    with open_stage() as own:
        _, comfy = _simulator(own, 1.0)
        process, port, other = own.start_turnstile(upstream.port, comfy)
        process.wait_for(port)
        process.wait_for(other)
        _chat(port)
        _call(other, "/prompt", {"prompt": sleep_graph(3600.0)})
        time.sleep(0.5)
        before = process.memory()
        clients = _Waiters(port, WAITING)
        _until(lambda: _lines(port) == WAITING)
        time.sleep(1.0)
        grown = process.memory() - before
        seconds = 2.0 + scale.stream_seconds
        cpu = process.cpu()
        time.sleep(seconds)
        idle = (process.cpu() - cpu) / seconds
        clients.vanish(VANISHING)
        slowest = 0.0
        while True:
            began = time.monotonic()
            left = _lines(port)
            slowest = max(slowest, time.monotonic() - began)
            if left == WAITING - VANISHING:
                break
        with contextlib.suppress(OSError):
            _call(other, "/interrupt", {})
        drained = clients.drain()
    return {
        "turnstile": {
            "grown_mib": grown / MIB,
            "idle_cpu_percent": idle * 100,
            "stall_ms": slowest * 1e3,
            "drain_s": drained,
        }
    }


def starts(stage: Stage, scale: Scale) -> Figures:
    """Row 9: from the start to listening and to the first answer; what it takes when idle."""
    upstream = stage.contestants["direct"]
    listening, answering, cpu, memory = [], [], [], []
    for _ in range(scale.starts):
        with open_stage() as own:
            process, port, _ = own.start_turnstile(upstream.port, upstream.port)
            listening.append(process.wait_for(port, every=0.002))
            _call(port, "/healthz")
            answering.append(time.monotonic() - process.began)
            cpu.append(process.cpu())
            time.sleep(1.0)
            memory.append(process.memory() / MIB)
    return {
        "turnstile": {
            "listening_s": statistics.median(listening),
            "answering_s": statistics.median(answering),
            "cpu_s": statistics.median(cpu),
            "rss_mib": statistics.median(memory),
        }
    }
