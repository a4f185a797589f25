"""Who shares which card, on turnstile's pages and among its metrics; see `turnstile.gpushare`.

turnstile only looks: it takes no slot. A look reads a few KiB of shared memory for each card, which costs less than
0.1 ms even with all slots taken, and happens when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnstile import log as tlog
from turnstile.gpushare.report import look_at_all, to_dict
from turnstile.gpushare.shm import PREFIX, list_keys
from turnstile.gpushare.snapshot import Snapshot
from turnstile.metrics import PREFIX as METRICS_PREFIX

_log = tlog.Logger()

#: No more cards than so many are looked at: everybody on the host can make more.
MOST_CARDS = 32

_LABELS = ["gpu", "slot", "name"]


class Peers(Collector):
    """Looks at the registries of cards; for Prometheus a collector of what it sees.

    :param key: the card; ``None``: all that have a registry.
    :param look: see `look_at_all`.
    :param keys: the cards that have a registry.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        look: Callable[[Sequence[str]], tuple[list[Snapshot], list[str]]] = look_at_all,
        keys: Callable[[], list[str]] = list_keys,
    ) -> None:
        self._key = key
        self._look = look
        self._keys = keys
        #: What could not be read, as far as the log tells already.
        self._told: frozenset[str] = frozenset()

    def look(self) -> tuple[list[Snapshot], list[str]]:
        """The cards' live peers, and why others could not be looked at. Never fails; new problems are logged."""
        try:
            keys = [self._key] if self._key is not None else self._keys()[:MOST_CARDS]
            found, problems = self._look(keys)
        except Exception as error:
            # A page with everything else on it is worth more than to be told in detail.
            found, problems = [], [f"{type(error).__name__}: {error}"]
        now = frozenset(problems)
        for problem in sorted(now - self._told):
            _log.warn("gpu-share: cannot be looked at: {problem}", problem=problem)
        self._told = now
        return found, problems

    def to_dict(self) -> dict[str, Any]:
        """What the pages show: one card in the form of GPU-share's own page, and all of them as ``cards``.

        The one is that which was configured, else the first with peers.
        """
        found, problems = self.look()
        cards = [to_dict(snapshot) for snapshot in found]
        first = next((card for card in cards if card["peers"]), cards[0] if cards else None)
        if first is None:
            first = {"gpu_key": self._key, "self": None, "peers": []}
        return {**first, "cards": cards, "problems": problems}

    def describe_now(self) -> list[str]:
        """A line for the log at start for each card that is shared."""
        found, _ = self.look()
        lines = []
        for snapshot in found:
            count = len(snapshot.peers)
            if not count and self._key is None:
                continue
            who = ", ".join(
                f"{peer.name or peer.pid} (weight {peer.weight:g})" for peer in snapshot.peers
            )
            alive = f"{count} peer{'s' * (count != 1)} alive"
            lines.append(
                f"gpu-share: watching /{PREFIX}{snapshot.key}, {alive}{': ' * bool(who)}{who}"
            )
        return lines

    def collect(self) -> Iterator[Metric]:
        """Share, busy and alive of every live peer; of those that are gone nothing is left."""
        found, _ = self.look()
        families = [
            GaugeMetricFamily(METRICS_PREFIX + name, text, labels=_LABELS)
            for name, text in (
                ("peer_share", "The part of its card's time that a peer of GPU-share has now."),
                ("peer_busy", "The part of the last two seconds in which the peer computed."),
                ("peer_alive", "1 for each peer whose heartbeat is young enough."),
            )
        ]
        for snapshot in found:
            shares = snapshot.get_shares()
            for peer in snapshot.peers:
                labels = [snapshot.key, str(peer.slot), peer.name]
                values = (shares[peer.slot], peer.busy, 1)
                for family, value in zip(families, values, strict=True):
                    family.add_metric(labels, value)
        yield from families


__all__ = ["MOST_CARDS", "Peers"]
