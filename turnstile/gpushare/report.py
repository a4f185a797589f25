"""Who shares a card, told to people and programs; pure but for `look_at_all`."""

from __future__ import annotations

from turnstile.gpushare.errors import GpuShareError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from turnstile.gpushare.snapshot import PeerInfo, Snapshot

_COLUMNS = ("SLOT", "PID", "NAME", "WEIGHT", "SHARE", "BUSY", "ACTIVE", "HEARTBEAT")


def to_dict(snapshot: Snapshot, pid: int | None = None) -> dict[str, Any]:
    """A card's peers in the form of ``GET /gpu/peers``.

    ``share_pct`` is the share that counts now, 0 for a peer that is idle; ``nominal_pct`` what it would be if all of
    them computed. ``self`` is the peer of process ``pid``, which is then not among ``peers``.
    """
    own, others = None, []
    for peer, entry in zip(snapshot.peers, _entries(snapshot), strict=True):
        if own is None and peer.pid == pid:
            del entry["heartbeat_age_ms"]
            own = entry
        else:
            others.append(entry)
    return {"gpu_key": snapshot.key, "self": own, "peers": others}


def _entries(snapshot: Snapshot) -> list[dict[str, Any]]:
    shares, nominal = snapshot.get_shares(), snapshot.get_nominal_shares()
    return [
        {
            "pid": peer.pid,
            "name": peer.name,
            "slot": peer.slot,
            "weight": round(peer.weight, 6),
            "share_pct": _percent(shares[peer.slot]),
            "nominal_pct": _percent(nominal[peer.slot]),
            "busy_pct": _percent(peer.busy),
            "active": peer.active,
            "heartbeat_age_ms": snapshot.get_age_ms(peer),
        }
        for peer in snapshot.peers
    ]


def _percent(part: float) -> float:
    return round(part * 100, 1)


def format_table(snapshot: Snapshot) -> str:
    """A card's peers as lines for a terminal."""
    shares, nominal = snapshot.get_shares(), snapshot.get_nominal_shares()
    rows: list[Sequence[str]] = [_COLUMNS]
    for peer in snapshot.peers:
        rows.append(_row(snapshot, peer, shares[peer.slot], nominal[peer.slot]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    count = len(snapshot.peers)
    head = f"{snapshot.key}: {count} peer{'s' * (count != 1)} alive"
    if not count:
        return head
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([head, *(f"  {line}".rstrip() for line in lines)])


def _row(snapshot: Snapshot, peer: PeerInfo, share: float, nominal: float) -> Sequence[str]:
    return (
        str(peer.slot),
        str(peer.pid),
        peer.name or "-",
        f"{peer.weight:g}",
        f"{share:.1%}" if peer.active else f"({nominal:.1%})",
        f"{peer.busy:.0%}",
        "yes" if peer.active else "no",
        f"{snapshot.get_age_ms(peer)} ms",
    )


def look_at_all(keys: Sequence[str]) -> tuple[list[Snapshot], list[str]]:
    """The registries of ``keys`` that can be read, and why the others can't."""
    from turnstile.gpushare.look import look_at

    found, problems = [], []
    for key in keys:
        try:
            snapshot = look_at(key)
        except (GpuShareError, OSError) as error:
            problems.append(str(error))
        else:
            if snapshot is not None:
                found.append(snapshot)
    return found, problems
