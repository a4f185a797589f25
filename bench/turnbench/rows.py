"""What is measured, row by row. Contestants take turns in short rounds, so that a busy moment hits all of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import attrs

from turnbench.procs import MIB
from turnbench.stage import Stage
from turnbench.tools import BUILD, find

#: Contestant -> name of a figure -> value.
Figures = dict[str, dict[str, float]]

CHAT = '{"model":"llama3.2","stream":false,"messages":[{"role":"user","content":"How are you today?"}]}'
BLOB = "/api/blobs/sha256:" + "0" * 64


@attrs.frozen
class Scale:
    """How long to measure."""

    #: Rounds of the rows with a closed loop, and the seconds of each.
    rounds: int
    seconds: float
    #: Streams and chunks a second of each.
    streams: tuple[tuple[int, int], ...]
    stream_seconds: float
    #: Requests for the time to the first byte.
    firsts: int
    #: Bytes of one transfer.
    transfer: int
    #: Seconds of WebSocket messages.
    ws_seconds: int
    #: Bytes of the long WebSocket message.
    ws_big: int
    #: Switches back and forth.
    switches: int
    starts: int


QUICK = Scale(2, 1.0, ((200, 100), (500, 100)), 2.0, 300, 256 * MIB, 2, 64 * MIB, 5, 3)
FULL = Scale(3, 4.0, ((200, 100), (500, 100), (1000, 50)), 8.0, 1000, 2048 * MIB, 8, 64 * MIB, 7, 7)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench: {command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _load(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run(f"{BUILD}/load", *map(str, arguments)))
    return found


def _loop(stage: Stage, url: str, body: str, connections: int, seconds: float) -> tuple[int, float]:
    """Requests that were answered, and the seconds that they took."""
    wrk = find("wrk")
    if wrk is None:
        arguments = (
            ("post", url, connections, seconds, body)
            if body
            else ("get", url, connections, seconds)
        )
        found = _load(*arguments)
        return found["requests"], found["seconds"]
    # wrk knows whole seconds only, of which one and a half are too few.
    command = [wrk, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s"]
    if body:
        script = stage.folder / "post.lua"
        script.write_text(
            f"wrk.method = 'POST'\nwrk.body = '{body}'\n"
            "wrk.headers['Content-Type'] = 'application/json'\n"
        )
        command += ["-s", str(script)]
    output = _run(*command, url)
    if "Non-2xx" in output or "Socket errors" in output:
        raise SystemExit(f"bench: wrk met errors at {url}:\n{output}")
    total = re.search(r"(\d+) requests in ([\d.]+)s", output)
    assert total is not None, output
    return int(total[1]), float(total[2])


def _closed_loop(stage: Stage, scale: Scale, path: str, body: str) -> Figures:
    requests: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    cpu: defaultdict[str, float] = defaultdict(float)
    for contestant in stage.contestants.values():
        _loop(stage, contestant.url(path), body, 16, 1.0)
    for _ in range(scale.rounds):
        for name, contestant in stage.contestants.items():
            before = contestant.process.cpu()
            count, took = _loop(stage, contestant.url(path), body, 16, scale.seconds)
            cpu[name] += contestant.process.cpu() - before
            requests[name] += count
            seconds[name] += took
    return {
        name: {
            "per_second": requests[name] / seconds[name],
            "cpu_us": cpu[name] / requests[name] * 1e6,
        }
        for name in stage.contestants
    }


def small_gets(stage: Stage, scale: Scale) -> Figures:
    """Row 1: GETs that need no lock, 16 connections."""
    return _closed_loop(stage, scale, "/api/version", "")


def chats(stage: Stage, scale: Scale) -> Figures:
    """Row 2: chat requests, each of which takes the lock, answered with 100 bytes; 16 connections."""
    return _closed_loop(stage, scale, "/api/chat", CHAT)


def streams(count: int, rate: int) -> Callable[[Stage, Scale], Figures]:
    """Row 3: so many streams at once of so many chunks a second."""

    def measure(stage: Stage, scale: Scale) -> Figures:
        found: Figures = {}
        for name, contestant in stage.contestants.items():
            before = contestant.process.cpu()
            arguments = (contestant.url("/api/chat"), count, rate, 100, scale.stream_seconds)
            figures = found[name] = _load("streams", *arguments)
            # The lead and the end of each stream are part of the work.
            chunks = count * rate * (scale.stream_seconds + 0.75)
            figures["cpu_us"] = (contestant.process.cpu() - before) / chunks * 1e6
        return _above_direct(found)

    return measure


def _above_direct(found: Figures) -> Figures:
    """Delays as what each adds to the median of the direct way."""
    base = found["direct"]["p50_ms"]
    for figures in found.values():
        for quantile in ("p50", "p99"):
            figures[f"added_{quantile}_ms"] = max(0.001, figures[f"{quantile}_ms"] - base)
    return found


def first_byte(stage: Stage, scale: Scale) -> Figures:
    """Row 4: time to the first byte, one request at a time."""
    targets = [f"{name}={c.url('/api/version')}" for name, c in stage.contestants.items()]
    found = _load("first", scale.firsts, *targets)
    return _above_direct({name: found[name] for name in stage.contestants})


def transfers(stage: Stage, scale: Scale) -> Figures:
    """Row 5: one long upload, one long download; how much the memory grows meanwhile."""
    found: Figures = {name: {} for name in stage.contestants}
    for kind, path in (("up", BLOB), ("down", "/bytes")):
        for name, contestant in stage.contestants.items():
            with contestant.process.growth() as grown:
                _load(kind, contestant.url(path), 8 * MIB)
                before = contestant.process.cpu()
                took = _load(kind, contestant.url(path), scale.transfer)["seconds"]
            found[name] |= {
                f"{kind}_mb_s": scale.transfer / took / 1e6,
                f"{kind}_cpu_s_gb": (contestant.process.cpu() - before) / scale.transfer * 1e9,
                f"{kind}_grown_mib": grown[0] / MIB,
            }
    return found


def websocket(stage: Stage, scale: Scale) -> Figures:
    """Row 6: 1,000 text messages a second with ten previews of 100 KB among them; a message of 64 MiB."""
    found: Figures = {}
    for name, contestant in stage.contestants.items():
        before = contestant.process.cpu()
        arguments = (contestant.comfy_url("/ws"), scale.ws_seconds, 1000, 200, 100, 100_000)
        figures = found[name] = _load("ws", *arguments)
        messages = figures["texts"] + figures["previews"]
        figures["cpu_us"] = (contestant.process.cpu() - before) / messages * 1e6
    for name, contestant in stage.contestants.items():
        with contestant.process.growth() as grown:
            _load("wsbig", contestant.comfy_url("/ws"), MIB)
            took = _load("wsbig", contestant.comfy_url("/ws"), scale.ws_big)["seconds"]
        found[name] |= {"big_mb_s": scale.ws_big / took / 1e6, "big_grown_mib": grown[0] / MIB}
    return _above_direct(found)
