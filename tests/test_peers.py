"""Who shares a card, as turnstile's pages and metrics tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from gpushare_kit import VirtualClock, join, new_key, path_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from system_kit import running
from twisted.logger import formatEvent, globalLogPublisher

from turnstile.gpushare import Peer
from turnstile.gpushare.look import look_at
from turnstile.gpushare.snapshot import Snapshot
from turnstile.peers import MOST_CARDS, Peers


class Looker:
    """What is seen, and a clock that goes with it."""

    def __init__(self, *keys: str) -> None:
        self.clock = VirtualClock()
        self.listed = list(keys)
        self.asked: list[list[str]] = []
        self.problems: list[str] = []

    def look(self, keys: Sequence[str]) -> tuple[list[Snapshot], list[str]]:
        self.asked.append(list(keys))
        seen = [look_at(key, self.clock) for key in keys]
        return [snapshot for snapshot in seen if snapshot is not None], self.problems

    def peers(self, key: str | None = None) -> Peers:
        return Peers(key, look=self.look, keys=lambda: self.listed)


@pytest.fixture
def logged() -> Any:
    lines: list[str] = []

    def observe(event: Any) -> None:
        lines.append(formatEvent(event))

    globalLogPublisher.addObserver(observe)
    yield lines
    globalLogPublisher.removeObserver(observe)


def samples(peers: Peers) -> dict[tuple[str, str, str], float]:
    """By metric, card and peer."""
    registry = CollectorRegistry()
    registry.register(peers)
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = sample.labels
            name = sample.name.removeprefix("gpu_turnstile_peer_")
            found[name, labels["gpu"], f"{labels['slot']} {labels['name']}"] = sample.value
    return found


def test_metrics_are_of_those_who_live() -> None:
    with new_key() as key:
        looker = Looker(key)
        peers = looker.peers()
        assert samples(peers) == {}
        with join(key, looker.clock, "chat", 2.0) as chat, join(key, looker.clock, "code") as code:
            chat.touch()
            code.touch()
            assert samples(peers) == {
                ("share", key, "0 chat"): pytest.approx(2 / 3),
                ("share", key, "1 code"): pytest.approx(1 / 3),
                ("busy", key, "0 chat"): 0,
                ("busy", key, "1 code"): 0,
                ("alive", key, "0 chat"): 1,
                ("alive", key, "1 code"): 1,
            }
            # One does not beat any more: as if it had been killed.
            looker.clock.advance(2.9)
            chat.tick()
            looker.clock.advance(0.2)
            assert {who for _, _, who in samples(peers)} == {"0 chat"}
        assert samples(peers) == {}


def test_any_name_makes_a_page_that_can_be_read() -> None:
    name = 'a"b\\c\n{x="y"} \u2603'
    with new_key() as key:
        looker = Looker(key)
        with join(key, looker.clock, name), join(key, looker.clock, name):
            registry = CollectorRegistry()
            registry.register(looker.peers())
            generate_latest(registry)
            families = text_string_to_metric_families(generate_openmetrics(registry).decode())
            shares = next(f for f in families if f.name == "gpu_turnstile_peer_share")
            names = [sample.labels["name"] for sample in shares.samples]
            assert names == [name.replace("\n", "\ufffd")] * 2


def test_the_page_is_that_of_one_card_and_of_all() -> None:
    with new_key() as empty, new_key() as full:
        looker = Looker(empty, full)
        join(empty, looker.clock).leave()
        with join(full, looker.clock, "chat", 2.0):
            page = looker.peers().to_dict()
            assert page["gpu_key"] == full and page["self"] is None
            assert [peer["name"] for peer in page["peers"]] == ["chat"]
            assert [card["gpu_key"] for card in page["cards"]] == [empty, full]
            assert page["cards"][1]["peers"] == page["peers"] and page["problems"] == []
            # The one that was asked for, and no other.
            page = looker.peers(empty).to_dict()
            assert page["gpu_key"] == empty and page["peers"] == [] and len(page["cards"]) == 1
            assert looker.asked[-1] == [empty]


def test_nobody_shares_a_card() -> None:
    nothing = {"gpu_key": None, "self": None, "peers": [], "cards": [], "problems": []}
    assert Looker().peers().to_dict() == nothing
    with new_key() as key:
        assert Looker().peers(key).to_dict() == {**nothing, "gpu_key": key}


def test_the_lines_at_start() -> None:
    with new_key() as key, new_key() as other:
        looker = Looker(key, other)
        join(other, looker.clock).leave()
        with join(key, looker.clock, "chat", 1.5), join(key, looker.clock, "code"):
            assert looker.peers().describe_now() == [
                f"gpu-share: watching /opencoti-gpu-{key}, 2 peers alive:"
                " chat (weight 1.5), code (weight 1)"
            ]
        assert looker.peers().describe_now() == []
        assert looker.peers(key).describe_now() == [
            f"gpu-share: watching /opencoti-gpu-{key}, 0 peers alive"
        ]


def test_what_cannot_be_read_is_told_once(logged: list[str]) -> None:
    with new_key() as good, new_key() as bad:
        Path(path_of(bad)).write_bytes(b"x" * 4096)
        with Peer.join(good, "chat", thread=False):
            peers = Peers(keys=lambda: [bad, good])
            for _ in range(3):
                page = peers.to_dict()
                assert page["gpu_key"] == good and len(page["problems"]) == 1
                assert len(samples(peers)) == 3
            assert len([line for line in logged if bad in line]) == 1
            os.unlink(path_of(bad))
            assert peers.to_dict()["problems"] == []
            # It comes back, and is told again.
            Path(path_of(bad)).write_bytes(b"x" * 4096)
            assert len(peers.to_dict()["problems"]) == 1
            assert len([line for line in logged if bad in line]) == 2


def test_a_look_never_fails(logged: list[str]) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError("oops")

    peers = Peers(keys=broken)
    for _ in range(3):
        assert peers.to_dict()["problems"] == ["ZeroDivisionError: oops"]
        assert samples(peers) == {}
    assert len([line for line in logged if "oops" in line]) == 1


def test_no_more_cards_are_looked_at_than_can_be() -> None:
    looker = Looker(*(f"card{number}" for number in range(1000)))
    looker.peers().to_dict()
    assert len(looker.asked[0]) == MOST_CARDS


@pytest_twisted.ensureDeferred
async def test_the_whole_service_tells(logged: list[str]) -> None:
    # In the middle of a step it is active for as long as that takes.
    with new_key() as key, Peer.join(key, "chat", 2.0) as chat, chat.step():
        async with running(llama=True, gpu_key=key) as it:
            assert any(f"watching /opencoti-gpu-{key}, 1 peer alive" in line for line in logged)
            for path in ("/gpu/peers", "/turnstile/gpu/peers"):
                page = (await it.request("GET", path)).json()
                assert page["gpu_key"] == key
                assert [(peer["name"], peer["share_pct"]) for peer in page["peers"]] == [
                    ("chat", 100.0)
                ]
            assert (await it.state())["gpu_share"]["peers"][0]["name"] == "chat"
            metrics = (await it.request("GET", "/metrics")).body.decode()
            line = f'gpu_turnstile_peer_share{{gpu="{key}",name="chat",slot="0"}} 1.0'
            assert line in metrics.splitlines()
            # That path is the engine's own there.
            assert (await it.request("GET", "/gpu/peers", to="llamacpp")).status == 404
            page = (await it.request("GET", "/turnstile/gpu/peers", to="llamacpp")).json()
            assert page["gpu_key"] == key
