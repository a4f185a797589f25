"""Mistakes that hostile or broken clients and engines brought to light, each as one short story."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_kit import System, check_overlaps
from twisted.internet.testing import StringTransport

from turnstile.engines import comfy_socket
from turnstile.sim.graphs import image_graph


@pytest.mark.parametrize("prompt_id", ["\ud800", "x" * 20_000])
def test_a_job_whose_id_makes_no_url_ends_when_the_queue_says_so(prompt_id: str) -> None:
    # Clients may choose the id. Half of a surrogate pair could not be put into /history/<id>, and for a very long one
    # aiohttp answers 400: each kept the card until JOB_TIMEOUT, though the job was over after a second.
    system = System(1, {"job_timeout": 600.0})
    with system.running():
        if len(prompt_id) > 8190:
            system.host.comfy.faults.status(400, "/history/*")
        body = {"prompt": image_graph(steps=1), "prompt_id": prompt_id}
        posted = system.world.wait(system.ask("comfyui", "POST", "/prompt", body))
        assert posted.status == 200
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat, 30.0).status == 200
        assert system.unrest() == []
        assert system.stop() == []


def _json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


ODD_FIGURES = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null", b'"1"', b"[1]", b"true"]


@pytest.mark.parametrize("figure", ODD_FIGURES)
@pytest.mark.parametrize("key", [b"vram_total", b"vram_free", b"torch_vram_total"])
def test_odd_figures_of_memory_do_not_end_the_watch(key: bytes, figure: bytes) -> None:
    # Python's JSON reads NaN, which is no number of bytes: the first look failed with it, nothing watched ComfyUI from
    # then on, and the first job kept the card for ever.
    system = System(1)
    system.host.comfy.faults.raw(
        _json(b'{"devices": [{"type": "cuda", "%s": %s}]}' % (key, figure)),
        "/system_stats",
        close=False,
    )
    with system.running():
        body = {"prompt": image_graph(steps=1)}
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", body)).status == 200
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat, 30.0).status == 200
        assert system.failures == [] and check_overlaps(system) == []
        assert system.stop() == []


@pytest.mark.parametrize("fault", ["status", "drop", "hang"])
def test_where_memory_cannot_be_told_comfyui_counts_as_freed_only_once_it_was_told_to(
    fault: str,
) -> None:
    # The time for which an idle worker is waited for ran from a /free that had failed: a chat loaded beside the image
    # models, outside a degraded interval.
    system = System(1)
    faults = system.host.comfy.faults
    faults.raw(_json(b"{}"), "/system_stats", close=False)
    with system.running():
        getattr(faults, fault)(*((500,) if fault == "status" else ()), "/free", 1)
        body = {"prompt": image_graph(steps=1)}
        assert system.world.wait(system.ask("comfyui", "POST", "/prompt", body)).status == 200
        chat = system.ask("ollama", "POST", "/api/generate", {"model": "llama3.2", "prompt": "why"})
        assert system.world.wait(chat, 30.0).status == 200
        assert check_overlaps(system) == [] and system.degraded == []
        assert system.stop() == []


def test_a_free_that_a_job_between_used_up_is_sent_again() -> None:
    # It frees after the running job, before the next, and the next one's models stayed: with memory that cannot be
    # told, the /free of two jobs ago was taken for theirs.
    system = System(1, comfy={"load_time": 0.1})
    comfy = system.host.comfy
    comfy.faults.raw(_json(b"{}"), "/system_stats", close=False)
    with system.running():
        for _ in range(2):
            comfy.submit(image_graph(steps=1, step_time=0.3))
        system.world.pass_time(0.05)
        assert "comfyui" in system.service.card.resident
        system.world.wait(system.service.card.evict("comfyui"))
        assert comfy.remaining == 0 and system.host.card.used_by("comfyui") == 0
        system.world.pass_time(5.0)
        assert system.stop() == []


class _Sink:
    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def opened(self) -> None: ...

    def text(self, payload: bytes) -> None:
        self.texts.append(payload)

    def lost(self, reason: str) -> None: ...


def _frame(first: int, length: int) -> bytes:
    return bytes((first, 127)) + length.to_bytes(8, "big")


def test_the_event_socket_gathers_no_message_that_it_does_not_need() -> None:
    # A message was gathered whole, however long: previews of tens of megabytes, or what a broken engine never ends.
    factory: Any = comfy_socket.websocket.WebSocketClientFactory(
        "ws://127.0.0.1:1/ws", reactor=object()
    )
    factory.protocol = comfy_socket.EventsProtocol
    factory.sink = sink = _Sink()
    factory.setProtocolOptions(openHandshakeTimeout=0)
    protocol = factory.buildProtocol(None)
    protocol.makeConnection(StringTransport())
    protocol.state = protocol.STATE_OPEN
    protocol.inside_message = False
    protocol.current_frame = None
    protocol.websocket_version = 13

    def held() -> int:
        return sum(
            sum(map(len, value)) if isinstance(value, list) else len(value)
            for value in vars(protocol).values()
            if isinstance(value, (bytes, bytearray))
            or (isinstance(value, list) and value and isinstance(value[0], bytes))
        )

    piece = b" " * 65536
    for first in (0x81, 0x82):
        protocol.dataReceived(_frame(first, 1 << 40))
        for _ in range(100):
            protocol.dataReceived(piece)
        assert held() < 2 * comfy_socket.TEXT_LIMIT
        # The frame would go on for long: end it here.
        protocol.current_frame = None
        protocol.inside_message = False
    protocol.dataReceived(b"\x01\x02he\x80\x03llo")
    assert sink.texts == [b"hello"]
