"""Where each word of the shared segment lies.

The layout is that of opencoti-llamafile's GPU-share, version 1, as its documentation gives it: native
byte order (little endian on every system that runs it) and natural alignment, a header, then slots.
All times are microseconds of CLOCK_REALTIME.
"""

#: Bytes of the segment; the slots end well before.
SEGMENT_SIZE = 4096
MAGIC = b"OCGPU\0\0\0"
VERSION = 1
SLOT_COUNT = 16

# Header.
MAGIC_AT = 0  # char[8]
VERSION_AT = 8  # u32
SLOT_COUNT_AT = 12  # u32
HEADER_SIZE = 16

# One slot.
PID = 0  # u32, 0 = free
BOOT_US = 8  # i64, when its owner joined
WEIGHT = 16  # f32
ACTIVE = 20  # u32, computed within ACTIVITY_US
HEARTBEAT_US = 24  # i64
BUSY_PPM = 32  # u32
NAME = 36  # char[48]
NAME_SIZE = 48
SLOT_SIZE = 88

SLOTS_END = HEADER_SIZE + SLOT_COUNT * SLOT_SIZE

# Beyond the slots the layout says nothing. There each of our peers repeats its slot's BOOT_US, i64
# by slot, so that it can be told from one of another make.
MARKS_AT = SLOTS_END

#: How often each peer renews its heartbeat.
BEAT_US = 500_000
#: A heartbeat older than this (or as far in the future) belongs to a dead peer.
DEAD_US = 3_000_000
#: A peer that has not computed for this long has no part in the division of time.
ACTIVITY_US = 2_000_000


def get_slot_offset(index: int) -> int:
    """Where slot ``index`` begins."""
    return HEADER_SIZE + index * SLOT_SIZE


def encode_name(name: str) -> bytes:
    """``name`` as a slot holds it: at most 47 bytes of whole UTF-8 characters, then zeros."""
    raw = name.replace("\0", "").encode("utf-8", "replace")[: NAME_SIZE - 1]
    # What the cut left of a character is no UTF-8 any more, and goes.
    return raw.decode("utf-8", "ignore").encode().ljust(NAME_SIZE, b"\0")


def decode_name(raw: bytes) -> str:
    """The name in a slot, safe to print whoever wrote it, and however torn it is."""
    text = raw.partition(b"\0")[0].decode("utf-8", "replace")
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
