"""What a registry says at one moment: who lives, who computes, what each one's share is."""

from __future__ import annotations

from typing import NamedTuple

from turnstile.gpushare import layout
from turnstile.gpushare.schedule import Claim, Schedule, clean_weight, compute_shares, make_schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from turnstile.gpushare.atomic import Words

#: When a registry that nobody changes says something else: never.
NEVER_US = (1 << 63) - 1


class PeerInfo(NamedTuple):
    """One live peer. ``busy`` is the part of the time, 0 to 1, that it computed lately."""

    slot: int
    pid: int
    name: str
    weight: float
    active: bool
    busy: float
    boot_us: int
    heartbeat_us: int
    #: Whether it is of this package's make.
    ours: bool


class Snapshot(NamedTuple):
    """The live peers in slot order, as seen at ``taken_us``."""

    key: str
    taken_us: int
    peers: tuple[PeerInfo, ...]
    #: When, with no word in the registry changing, somebody comes to life or dies of age.
    stale_us: int

    def get(self, slot: int) -> PeerInfo | None:
        """The live peer of ``slot``."""
        for peer in self.peers:
            if peer.slot == slot:
                return peer
        return None

    def get_age_ms(self, peer: PeerInfo) -> int:
        """How old ``peer``'s heartbeat was, in milliseconds."""
        return max(self.taken_us - peer.heartbeat_us, 0) // 1000

    def make_schedule(self) -> Schedule:
        """The division of time among those who compute."""
        return make_schedule(Claim(p.slot, p.weight) for p in self.peers if p.active)

    def get_shares(self) -> dict[int, float]:
        """By slot: the share, 0 to 1, of each live peer now; 0 for those that are idle."""
        return self._get_shares([peer for peer in self.peers if peer.active])

    def get_nominal_shares(self) -> dict[int, float]:
        """By slot: the share that each live peer would have if all of them computed."""
        return self._get_shares(list(self.peers))

    def _get_shares(self, peers: list[PeerInfo]) -> dict[int, float]:
        shares = dict.fromkeys([peer.slot for peer in self.peers], 0.0)
        computed = compute_shares([peer.weight for peer in peers])
        shares.update(zip([peer.slot for peer in peers], computed, strict=True))
        return shares


def is_alive(heartbeat_us: int, now_us: int) -> bool:
    """Whether a peer with this heartbeat lives.

    One far in the future is none: the clock was set back, and who lives has renewed his since.
    """
    return -layout.DEAD_US <= now_us - heartbeat_us <= layout.DEAD_US


def take_snapshot(words: Words, key: str, now_us: int) -> Snapshot:
    """Read every slot. Others write meanwhile: names may be torn, words are not."""
    peers = []
    stale_us = NEVER_US
    for slot in range(layout.SLOT_COUNT):
        base = layout.get_slot_offset(slot)
        pid = words.load_u32(base + layout.PID)
        if not pid:
            continue
        heartbeat_us = words.load_i64(base + layout.HEARTBEAT_US)
        if not is_alive(heartbeat_us, now_us):
            if heartbeat_us > now_us:
                stale_us = min(stale_us, heartbeat_us - layout.DEAD_US)
            continue
        stale_us = min(stale_us, heartbeat_us + layout.DEAD_US + 1)
        boot_us = words.load_i64(base + layout.BOOT_US)
        peers.append(
            PeerInfo(
                slot,
                pid,
                layout.decode_name(words.load_bytes(base + layout.NAME, layout.NAME_SIZE)),
                clean_weight(words.load_f32(base + layout.WEIGHT)),
                words.load_u32(base + layout.ACTIVE) != 0,
                min(words.load_u32(base + layout.BUSY_PPM), 1_000_000) / 1e6,
                boot_us,
                heartbeat_us,
                words.load_i64(layout.MARKS_AT + 8 * slot) == boot_us,
            )
        )
    return Snapshot(key, now_us, tuple(peers), stale_us)
