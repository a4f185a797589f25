"""Clients of turnstile's, out here."""

import http.client
import json
import socket
import threading
import time
from typing import Any

from machine import Failed

OLLAMA, COMFY = 11434, 8188


class Answer:
    """Status, body and how long it took."""

    def __init__(self, status: int, body: bytes, seconds: float) -> None:
        self.status = status
        self.body = body
        self.seconds = seconds

    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, target: str, body: object = None, *, seconds: float = 20.0) -> Answer:
    """One request on a connection of its own; raises OSError if there is no answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        if body is None:
            connection.request("GET", target)
        else:
            connection.request(
                "POST", target, json.dumps(body), {"Content-Type": "application/json"}
            )
        response = connection.getresponse()
        return Answer(response.status, response.read(), time.monotonic() - began)
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def expect(
    port: int, target: str, status: int = 200, body: object = None, *, seconds: float = 20.0
) -> Answer:
    """The answer, which has to have that status."""
    try:
        answer = ask(port, target, body, seconds=seconds)
    except OSError as error:
        raise Failed(f"port {port}, {target}: {error}") from None
    if answer.status != status:
        raise Failed(f"port {port}, {target}: {answer.status} {answer.body[:200]!r}")
    return answer


def is_open(port: int) -> bool:
    """Whether connections are accepted there, if only by the kernel."""
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def chat(tokens: int = 4) -> dict[str, object]:
    """What makes Ollama stream so many tokens (50 in a second)."""
    return {
        "model": "llama3.2",
        "prompt": "why",
        "stream": True,
        "options": {"num_predict": tokens},
    }


class Stream(threading.Thread):
    """A chat whose answer comes for a while; `outcome` says how it ended: ``whole``, ``cut``, or a reason."""

    def __init__(self, tokens: int) -> None:
        super().__init__(daemon=True)
        self._tokens = tokens
        self._first = threading.Event()
        self.lines = 0
        self.outcome = "no answer"
        self.ended_at = 0.0
        self.start()

    def wait_for_first(self) -> None:
        """Until the first token is here."""
        if not self._first.wait(20) or not self.lines:
            raise Failed(f"the stream did not begin: {self.outcome}")

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", OLLAMA, timeout=60)
        try:
            connection.request("POST", "/api/generate", json.dumps(chat(self._tokens)))
            response = connection.getresponse()
            last = b""
            while line := response.readline():
                last = line
                self.lines += 1
                self._first.set()
            # readline() hides an answer that was cut off.
            self.outcome = "whole" if json.loads(last).get("done") else "cut"
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.outcome = "cut" if self.lines else f"{type(error).__name__}: {error}"
        finally:
            self.ended_at = time.monotonic()
            self._first.set()
            connection.close()

    def end(self) -> str:
        """How it ended."""
        self.join(90)
        if self.is_alive():
            raise Failed("the stream did not end")
        return self.outcome


class Pinger(threading.Thread):
    """Asks one request after the other, on a connection of its own each, until `stop`."""

    def __init__(self, port: int, target: str) -> None:
        super().__init__(daemon=True)
        self._where = port, target
        self._stopped = threading.Event()
        self.answers: list[float] = []
        self.failures: list[str] = []
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            try:
                answer = ask(*self._where)
            except OSError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            else:
                self.answers.append(answer.seconds)
                if answer.status != 200:
                    self.failures.append(f"{answer.status} {answer.body[:100]!r}")

    def stop(self) -> str:
        """What it saw; raises `Failed` if a request failed."""
        self._stopped.set()
        self.join(30)
        if self.failures or not self.answers:
            raise Failed(
                f"{len(self.failures)} of {len(self.answers)} requests: {self.failures[:3]}"
            )
        return f"{len(self.answers)} requests meanwhile, all 200, the slowest after {max(self.answers):.1f} s"
