"""GPU-share's shared memory: creation, refusals, and that a refusal changes nothing."""

import ctypes
import fcntl
import os
import stat
import struct
import subprocess
import sys
import threading

import pytest
from gpushare_kit import new_key, path_of

from turnstile.gpushare import atomic, layout, shm
from turnstile.gpushare.atomic import find_swaps
from turnstile.gpushare.errors import SegmentError

HEADER = layout.MAGIC + struct.pack("=II", 1, 16)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")
pytestmark = linux


@pytest.fixture
def key():
    with new_key() as key:
        yield key


def put(key, content, mode=0o600):
    with open(path_of(key), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)


def content(key):
    with open(path_of(key), "rb") as file:
        return file.read()


def mode(key):
    return stat.S_IMODE(os.stat(path_of(key)).st_mode)


# -- the layout


def test_the_layout_is_what_a_c_compiler_makes_of_it():
    class Slot(ctypes.Structure):
        _fields_ = [
            ("pid", ctypes.c_uint32),
            ("boot_us", ctypes.c_int64),
            ("weight", ctypes.c_float),
            ("active", ctypes.c_uint32),
            ("heartbeat_us", ctypes.c_int64),
            ("busy_ppm", ctypes.c_uint32),
            ("name", ctypes.c_char * 48),
        ]

    class Registry(ctypes.Structure):
        _fields_ = [
            ("magic", ctypes.c_char * 8),
            ("version", ctypes.c_uint32),
            ("slot_count", ctypes.c_uint32),
            ("slots", Slot * 16),
        ]

    assert Registry.version.offset == layout.VERSION_AT
    assert Registry.slot_count.offset == layout.SLOT_COUNT_AT
    assert Registry.slots.offset == layout.HEADER_SIZE == 16
    assert ctypes.sizeof(Slot) == layout.SLOT_SIZE == 88
    assert ctypes.sizeof(Registry) == layout.SLOTS_END < layout.SEGMENT_SIZE == 4096
    for name in ("pid", "boot_us", "weight", "active", "heartbeat_us", "busy_ppm", "name"):
        assert getattr(Slot, name).offset == getattr(layout, name.upper())
    assert Slot.name.size == layout.NAME_SIZE
    assert layout.MARKS_AT % 8 == 0
    assert layout.MARKS_AT + 8 * 16 <= layout.SEGMENT_SIZE


@pytest.mark.parametrize(
    "name, stored",
    [
        ("qwen3-4b", b"qwen3-4b"),
        ("", b""),
        ("a\0b", b"ab"),
        ("x" * 60, b"x" * 47),
        # 2, 3 and 4 bytes long: none is cut in the middle.
        ("é" * 30, "é".encode() * 23),
        ("x" + "é" * 30, b"x" + "é".encode() * 23),
        ("語" * 30, "語".encode() * 15),
        ("🙂" * 30, "🙂".encode() * 11),
        ("\ud800half", b"?half"),
    ],
)
def test_names(name, stored):
    raw = layout.encode_name(name)
    assert len(raw) == 48
    assert raw.rstrip(b"\0") == stored
    assert layout.decode_name(raw) == stored.decode()


def test_names_of_others_cannot_drive_a_terminal():
    assert layout.decode_name(b"a\x1b[2Jb\xff\nc".ljust(48, b"\0")) == "a\ufffd[2Jb\ufffd\ufffdc"
    assert layout.decode_name(b"n" * 48) == "n" * 48  # nobody ended it
    assert layout.decode_name("é".encode() * 30) == "é" * 15 + "é" * 15


# -- words


@pytest.mark.parametrize("swaps", [find_swaps(), None], ids=["libatomic", "plain"])
def test_words(key, swaps):
    segment = shm.open_segment(key, swaps=lambda: swaps)
    words = segment.words
    assert words.lock_free == (swaps is not None)
    words.store_u32(20, 0xFFFFFFFF)
    assert words.load_u32(20) == 0xFFFFFFFF
    assert not words.swap_u32(20, 0, 5)
    assert words.load_u32(20) == 0xFFFFFFFF
    assert words.swap_u32(20, 0xFFFFFFFF, 5)
    assert words.load_u32(20) == 5
    words.store_i64(24, -(1 << 63))
    assert not words.swap_i64(24, 0, 7)
    assert words.swap_i64(24, -(1 << 63), (1 << 63) - 1)
    assert words.load_i64(24) == (1 << 63) - 1
    words.store_f32(32, 1.5)
    assert words.load_f32(32) == 1.5
    words.store_bytes(40, b"abc")
    assert words.load_bytes(40, 4) == b"abc\0"
    # Native order, in the shared memory itself.
    assert content(key)[20:36] == struct.pack("=Iqf", 5, (1 << 63) - 1, 1.5)
    segment.close()
    segment.close()
    assert segment.copy() == b""


def test_libatomic_is_found_here():
    """What the next test needs; Debian's libatomic1."""
    assert find_swaps() is not None


def test_compare_and_swap_is_atomic_between_processes(key):
    """Four processes count to the same number; nothing gets lost."""
    code = (
        "import sys\n"
        "from turnstile.gpushare.shm import open_segment\n"
        "words = open_segment(sys.argv[1]).words\n"
        "sys.stdin.read(1)\n"
        "for _ in range(20000):\n"
        "    while True:\n"
        "        old = words.load_u32(2000)\n"
        "        if words.swap_u32(2000, old, old + 1): break\n"
        "    while True:\n"
        "        old = words.load_i64(2008)\n"
        "        if words.swap_i64(2008, old, old - (1 << 33)): break\n"
    )
    segment = shm.open_segment(key)
    children = [
        subprocess.Popen([sys.executable, "-c", code, key], stdin=subprocess.PIPE) for _ in range(4)
    ]
    for child in children:
        child.communicate(b"x")
        assert child.returncode == 0
    assert segment.words.load_u32(2000) == 80000
    assert segment.words.load_i64(2008) == -80000 << 33
    segment.close()


@pytest.mark.parametrize("fault", ["missing", "no such function", "not lock-free", "wrong"])
def test_an_unfit_libatomic_is_none(monkeypatch, fault):
    real = ctypes.PyDLL

    class Library:
        def __init__(self, name):
            if fault == "missing" or name != "libatomic.so.1":
                raise OSError(name)
            self._real = real(name)

        def __getitem__(self, name):
            if fault == "no such function":
                raise AttributeError(name)
            if fault == "not lock-free" and name == "__atomic_is_lock_free":
                return lambda size, at: size == 4
            if fault == "wrong" and name == "__atomic_compare_exchange_8":
                return lambda *arguments: True
            return self._real[name]

    monkeypatch.setattr(ctypes, "PyDLL", Library)
    monkeypatch.setattr(atomic, "_searched", False)
    monkeypatch.setattr(atomic, "_found", None)
    assert find_swaps() is None


# -- creation


def test_a_new_one(key):
    segment = shm.open_segment(key)
    assert segment.name == f"/opencoti-gpu-{key}"
    assert content(key) == HEADER.ljust(4096, b"\0")
    assert mode(key) == 0o600
    assert not segment.is_orphaned()
    # The page is there: a store can't meet a full file system.
    assert os.stat(path_of(key)).st_blocks * 512 >= 4096
    segment.words.store_u32(100, 7)
    again = shm.open_segment(key)
    assert again.words.load_u32(100) == 7
    assert shm.read_segment(key) == content(key)
    os.unlink(path_of(key))
    assert segment.is_orphaned()
    for one in (segment, again):
        one.close()


def test_whatever_the_umask(key):
    before = os.umask(0o777)
    try:
        shm.open_segment(key).close()
    finally:
        os.umask(before)
    assert mode(key) == 0o600


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_group(key, unnamed, monkeypatch):
    if not unnamed:
        monkeypatch.setattr(shm, "_create_unnamed", lambda: None)
    shm.open_segment(key, group=os.getegid()).close()
    assert mode(key) == 0o660
    shm.open_segment(key, group=os.getegid()).close()
    with pytest.raises(SegmentError, match="mode 0660"):
        shm.open_segment(key)
    with pytest.raises(SegmentError, match=r"belongs to group .* not to 54321"):
        shm.open_segment(key, group=54321)
    assert content(key) == HEADER.ljust(4096, b"\0")


def test_where_unnamed_files_do_not_exist(key, monkeypatch):
    monkeypatch.setattr(shm, "_create_unnamed", lambda: None)
    shm.open_segment(key).close()
    assert content(key) == HEADER.ljust(4096, b"\0")
    assert mode(key) == 0o600


def test_many_at_once_make_one(key):
    segments = []
    barrier = threading.Barrier(8)

    def make():
        barrier.wait()
        segments.append(shm.open_segment(key))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(segments) == 8
    assert {os.fstat(s._fd).st_ino for s in segments} == {os.stat(path_of(key)).st_ino}
    for segment in segments:
        segment.close()


def test_no_memory_left(key, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentError, match="No space left"):
        shm.open_segment(key)


def test_no_shared_memory_on_this_system(key, monkeypatch, tmp_path):
    monkeypatch.setattr(shm, "_DIRECTORY", str(tmp_path / "shm"))
    with pytest.raises(SegmentError, match="this system has no"):
        shm.open_segment(key)
    assert shm.list_keys() == []
    assert shm.read_segment(key) is None


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        bytes(4096),
        bytes(8) + struct.pack("=II", 1, 0) + bytes(4080),
        bytes(8) + struct.pack("=II", 1, 16) + bytes(4080),
    ],
    ids=["no size", "all zero", "version", "version and slots"],
)
def test_what_a_dead_creator_left_is_finished(key, begun):
    put(key, begun)
    segment = shm.open_segment(key)
    assert content(key) == HEADER.ljust(4096, b"\0")
    segment.close()


def test_a_slow_creator_is_waited_for(key, monkeypatch):
    """One that writes the magic first, which we don't."""
    put(key, layout.MAGIC + bytes(4088))
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            put(key, HEADER.ljust(4096, b"\0"))

    monkeypatch.setattr(shm.time, "sleep", sleep)
    shm.open_segment(key).close()
    assert len(naps) == 3


# -- refusals


@pytest.mark.parametrize(
    "bad, words",
    [
        (b"#!/bin/sh\necho\n".ljust(4096, b"x"), "not a GPU-share registry"),
        (b"OCGPU\0\0\1" + HEADER[8:] + bytes(4080), "not a GPU-share registry"),
        (b"\x7f" * 4096, "not a GPU-share registry"),
        (bytes(8) + struct.pack("=II", 7, 16) + bytes(4080), "not a GPU-share registry"),
        (bytes(100) + b"x" + bytes(3995), "not a GPU-share registry"),
        (layout.MAGIC + struct.pack("=II", 2, 16) + bytes(4080), "version 2 .*update"),
        (layout.MAGIC + struct.pack("=II", 0, 16) + bytes(4080), "damaged"),
        (layout.MAGIC + struct.pack("=II", 1, 17) + bytes(4080), "damaged"),
        (layout.MAGIC + bytes(4088), "damaged"),
        (HEADER, "16 bytes instead of 4096"),
        (HEADER.ljust(1424, b"\0"), "1424 bytes instead of 4096"),
    ],
)
def test_foreign_and_damaged_content(key, bad, words):
    put(key, bad)
    with pytest.raises(SegmentError, match=words):
        shm.open_segment(key)
    with pytest.raises(SegmentError, match=words):
        shm.read_segment(key)
    assert content(key) == bad


def test_the_error_of_a_future_version_names_it(key):
    put(key, (layout.MAGIC + struct.pack("=II", 9, 32)).ljust(8192, b"\1"))
    with pytest.raises(SegmentError, match=f"/opencoti-gpu-{key} has version 9 of the layout"):
        shm.open_segment(key)


@pytest.mark.parametrize("bits", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o666, 0o700])
def test_others_may_not_have_access(key, bits):
    put(key, HEADER.ljust(4096, b"\0"), bits)
    with pytest.raises(SegmentError, match=f"mode 0{bits:o}"):
        shm.open_segment(key)
    assert mode(key) == bits


@pytest.mark.parametrize("bits", [0o661, 0o664, 0o666, 0o670])
def test_nor_may_others_than_the_group(key, bits):
    put(key, HEADER.ljust(4096, b"\0"), bits)
    with pytest.raises(SegmentError, match=f"mode 0{bits:o}: expected 0660"):
        shm.open_segment(key, group=os.getegid())


def test_the_owner():
    def status(uid=1000, gid=100, bits=0o600, size=4096):
        return os.stat_result((stat.S_IFREG | bits, 1, 1, 1, uid, gid, size, 0, 0, 0))

    shm._check_owner(status(), "/n", 1000, None)
    with pytest.raises(SegmentError, match="belongs to user 1000, not to 1001"):
        shm._check_owner(status(), "/n", 1001, None)
    with pytest.raises(SegmentError, match="belongs to user 1000, not to 0"):
        shm._check_owner(status(), "/n", 0, None)
    # In a group any member may have made it.
    shm._check_owner(status(bits=0o660), "/n", 1001, 100)
    with pytest.raises(SegmentError, match="belongs to group 100, not to 101"):
        shm._check_owner(status(bits=0o660), "/n", 1000, 101)
    # Our own that is not finished gets its group later; somebody else's does not count.
    shm._check_owner(status(size=0), "/n", 1000, 101)
    with pytest.raises(SegmentError, match="belongs to group"):
        shm._check_owner(status(size=0), "/n", 1001, 101)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_somebody_elses(key):
    shm.open_segment(key).close()
    os.chown(path_of(key), 54321, 54321)
    with pytest.raises(SegmentError, match="belongs to user 54321"):
        shm.open_segment(key)
    code = (
        "import os, sys\n"
        "from turnstile.gpushare.shm import open_segment\n"
        "os.setgid(54322); os.setuid(54322)\n"
        "open_segment(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, key], capture_output=True, text=True)
    assert "belongs to another user" in done.stderr
    assert os.stat(path_of(key)).st_uid == 54321


def test_no_links_and_no_devices(key, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"")
    os.symlink(target, path_of(key))
    with pytest.raises(SegmentError, match="symbolic link"):
        shm.open_segment(key)
    with pytest.raises(SegmentError, match="symbolic link"):
        shm.read_segment(key)
    assert target.read_bytes() == b""
    os.unlink(path_of(key))
    os.mkfifo(path_of(key), 0o600)
    with pytest.raises(SegmentError, match="not shared memory"):
        shm.open_segment(key)


@pytest.mark.parametrize("bad", ["", "a/b", "..\n", "a b", "é", "x" * 201, "a\0b"])
def test_keys_that_are_none(bad):
    for function in (shm.check_key, shm.open_segment, shm.read_segment):
        with pytest.raises(SegmentError, match="not a card's key"):
            function(bad)


def test_a_look_from_outside(key):
    assert shm.read_segment(key) is None
    put(key, bytes(4096))
    assert shm.read_segment(key) is None  # just being made
    os.unlink(path_of(key))
    shm.open_segment(key).close()
    assert shm.read_segment(key) == HEADER.ljust(4096, b"\0")
    with new_key() as odd:
        odd += " \x1b"
        put(odd, b"")
        assert key in shm.list_keys()
        assert odd not in shm.list_keys()
        os.unlink(path_of(odd))


# -- the file lock


def hold_lock(key):
    """Another open file of the same memory, which has the lock."""
    fd = os.open(path_of(key), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_with_compare_and_swap_the_lock_is_a_courtesy(key, monkeypatch):
    monkeypatch.setattr(shm, "_POLITE_LOCK_SECONDS", 0.0)
    segment = shm.open_segment(key)
    other = hold_lock(key)
    with segment.lock():
        pass
    os.close(other)
    with segment.lock():
        fd = os.open(path_of(key), os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    segment.close()


def test_without_it_the_lock_is_needed(key, monkeypatch):
    monkeypatch.setattr(shm, "_LOCK_SECONDS", 0.0)
    segment = shm.open_segment(key, swaps=lambda: None)
    other = hold_lock(key)
    with pytest.raises(SegmentError, match="kept its lock"), segment.lock():
        pytest.fail("it was let in")
    os.close(other)
    with segment.lock():
        pass
    segment.close()


def test_the_memory_is_not_passed_on(key):
    segment = shm.open_segment(key)
    assert not os.get_inheritable(segment._fd)
    segment.close()
