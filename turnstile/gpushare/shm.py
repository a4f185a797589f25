"""The shared memory of one card: opened, created, checked; never unlinked.

On Linux a POSIX shared memory object is a file in /dev/shm. The memory is trusted once it is mapped, so it
must belong to us alone (mode 0600) or to a group that was named (0660).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import time

from turnstile.gpushare import layout
from turnstile.gpushare.atomic import Words, find_swaps
from turnstile.gpushare.errors import SegmentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from turnstile.gpushare.atomic import Swap

PREFIX = "opencoti-gpu-"
_DIRECTORY = "/dev/shm"
_ON_LINUX = sys.platform.startswith("linux")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_KEY_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
_LONGEST_KEY = 200
#: How long a header may take to appear in memory that another program is just creating.
_CREATION_SECONDS = 0.2
#: How long a claimant waits for others that hold the file lock.
_LOCK_SECONDS = 2.0
_POLITE_LOCK_SECONDS = 0.05


class Segment:
    """The memory, mapped. ``words`` are its words, ``key`` is the card's."""

    def __init__(self, key: str, fd: int, swaps: tuple[Swap, Swap] | None) -> None:
        self.key = key
        self._fd = fd
        self._mapping = mmap.mmap(fd, layout.SEGMENT_SIZE)
        self.words = Words(self._mapping, swaps)

    @property
    def name(self) -> str:
        """The object's name, with the slash."""
        return f"/{PREFIX}{self.key}"

    def copy(self) -> bytes:
        """The header and the slots as they are now; not atomic, to be compared with another copy.

        Empty once it is closed, which another thread may do at any time.
        """
        try:
            return self._mapping[: layout.SLOTS_END]
        except ValueError:
            return b""

    def is_orphaned(self) -> bool:
        """Whether somebody unlinked it, so that newcomers will meet elsewhere."""
        return _ON_LINUX and os.fstat(self._fd).st_nlink == 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the file lock that serialises claims.

        With compare-and-swap at hand it is a courtesy to peers that lack it, and waited for briefly only.
        Otherwise it is all there is: `SegmentError` if others keep it for two seconds. It ends with
        its holder, however that one dies.
        """
        seconds = _POLITE_LOCK_SECONDS if self.words.lock_free else _LOCK_SECONDS
        held = self._acquire(seconds)
        if not held and not self.words.lock_free:
            raise SegmentError(f"{self.name}: another process has kept its lock for {seconds:g} s")
        try:
            yield
        finally:
            if held:
                self._flock(unlock=True)

    def _acquire(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._flock():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def _flock(self, *, unlock: bool = False) -> bool:
        import fcntl

        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN if unlock else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Unmap it; what it holds stays for others."""
        if self._fd < 0:
            return
        self.words.close()
        self._mapping.close()
        os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """Close what can be closed while others of the process may have been reading, before a fork."""
        with contextlib.suppress(BufferError):
            self.words.close()
            self._mapping.close()
        os.close(self._fd)
        self._fd = -1


def open_segment(
    key: str,
    *,
    group: int | None = None,
    swaps: Callable[[], tuple[Swap, Swap] | None] = find_swaps,
) -> Segment:
    """Map the memory of the card ``key``; create it if there is none.

    ``group``: the id of a group whose members share it. Raises `SegmentError` if it is not to be had, is
    somebody else's, or holds anything but version 1 of the layout; then nothing was changed.
    """
    check_key(key)
    try:
        fd, name = _open_or_create(key, group)
    except OSError as error:
        raise SegmentError(_explain(key, error)) from error
    try:
        _check_owner(os.fstat(fd), name, os.geteuid(), group)
        _check_content(fd, name, group)
        return Segment(key, fd, swaps())
    except OSError as error:
        os.close(fd)
        raise SegmentError(f"/{PREFIX}{key}: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise


def read_segment(key: str) -> bytes | None:
    """A copy of the memory of the card ``key``, for a look from outside; None if there is none.

    Raises `SegmentError` if it can't be read or does not hold version 1 of the layout.
    """
    check_key(key)
    name = f"/{PREFIX}{key}"
    try:
        fd = _open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentError(_explain(key, error)) from error
    try:
        image = _read(fd)
    except OSError as error:
        raise SegmentError(f"{name}: {error.strerror}") from error
    finally:
        os.close(fd)
    if not any(image):
        return None  # just being created
    _check_header(image, name)
    return image


def list_keys() -> list[str]:
    """The cards that have shared memory on this host, in order; only Linux can tell."""
    try:
        names = os.listdir(_DIRECTORY)
    except OSError:
        return []
    keys = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return sorted(key for key in keys if _is_key(key))


def check_key(key: str) -> None:
    """Raise `SegmentError` unless ``key`` can be part of a shared memory object's name."""
    if not _is_key(key):
        raise SegmentError(
            f"{key!r} is not a card's key: 1 to {_LONGEST_KEY} letters, digits, or any of -_.:"
        )


def _is_key(key: str) -> bool:
    return 0 < len(key) <= _LONGEST_KEY and _KEY_CHARACTERS.issuperset(key)


def _explain(key: str, error: OSError) -> str:
    name = f"/{PREFIX}{key}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{name} belongs to another user: run all peers as one user, or create it with a group"
            " that has them all"
        )
    if error.errno == errno.ELOOP:
        return f"{name} is a symbolic link, not shared memory"
    if error.errno == errno.ENOENT:
        return f"{name}: this system has no {_DIRECTORY}"
    return f"{name}: {error.strerror}"


# -- opening ---------------------------------------------------------------------------------------


def _open(name: str, flags: int, mode: int = 0) -> int:
    if _ON_LINUX:
        return os.open(_DIRECTORY + name, flags | _FLAGS, mode)
    # Elsewhere shared memory has no place in the file system. This module is what Python's own
    # shared_memory is built on; it has no tracker that would unlink what others use.
    import _posixshmem  # type: ignore[import-not-found, unused-ignore]

    fd: int = _posixshmem.shm_open(name, flags, mode)
    os.set_inheritable(fd, False)
    return fd


def _open_or_create(key: str, group: int | None) -> tuple[int, str]:
    name = f"/{PREFIX}{key}"
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return _open(name, os.O_RDWR), name
        # Not with one O_CREAT: Linux may refuse that on another user's file in a sticky directory,
        # whatever its mode.
        with contextlib.suppress(FileExistsError):
            return _create(name, group), name
    raise OSError(errno.EAGAIN, "somebody keeps creating and unlinking it")


def _create(name: str, group: int | None) -> int:
    fd = _create_unnamed()
    if fd is not None:
        try:
            # Complete before it has a name.
            _initialise(fd, name, group)
            # src_dir_fd is ignored for an absolute path; giving it makes Python follow the link.
            os.link(f"/proc/self/fd/{fd}", _DIRECTORY + name, src_dir_fd=fd)
        except SegmentError:
            os.close(fd)
            raise
        except OSError:  # the name is taken, or there is no /proc
            os.close(fd)
        else:
            return fd
    fd = _open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _initialise(fd, name, group)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_unnamed() -> int | None:
    """New memory without a name, where the system has such a thing."""
    if not _ON_LINUX:
        return None
    try:
        return os.open(_DIRECTORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _initialise(fd: int, name: str, group: int | None) -> None:
    """Give new memory its owner, size and header. Doing it twice, or at once with others, is harmless."""
    try:
        if group is not None:
            os.fchown(fd, -1, group)
        os.fchmod(fd, 0o600 if group is None else 0o660)
    except OSError as error:
        if _ON_LINUX:  # others don't know owners of shared memory
            reason = f"cannot be given to group {group}: {error.strerror}"
            raise SegmentError(f"{name} {reason}") from error
    try:
        _allocate(fd)
    except OSError as error:
        raise SegmentError(f"{name}: no memory for it: {error.strerror}") from error
    with (
        mmap.mmap(fd, layout.SEGMENT_SIZE) as mapping,
        memoryview(mapping) as view,
        view.cast("I") as u32,
        view.cast("Q") as u64,
    ):
        u32[layout.VERSION_AT >> 2] = layout.VERSION
        u32[layout.SLOT_COUNT_AT >> 2] = layout.SLOT_COUNT
        # Last, and in one store: who sees it sees the others.
        u64[layout.MAGIC_AT >> 3] = int.from_bytes(layout.MAGIC, sys.byteorder)


def _allocate(fd: int) -> None:
    """Let the memory have its size and its page; `OSError` if the system has none left.

    Without a page the first store to it would end the process with SIGBUS.
    """
    if _ON_LINUX:
        os.posix_fallocate(fd, 0, layout.SEGMENT_SIZE)
    elif os.fstat(fd).st_size == 0:
        os.ftruncate(fd, layout.SEGMENT_SIZE)


# -- checks ----------------------------------------------------------------------------------------


def _check_owner(status: os.stat_result, name: str, euid: int, group: int | None) -> None:
    if _ON_LINUX and not stat.S_ISREG(status.st_mode):
        raise SegmentError(f"{name} is not shared memory")
    mode = stat.S_IMODE(status.st_mode)
    if group is None:
        if status.st_uid != euid:
            raise SegmentError(
                f"{name} belongs to user {status.st_uid}, not to {euid}: run all peers as one user,"
                " or give all of them one group"
            )
        if mode & 0o177:
            raise SegmentError(
                f"{name} has mode {mode:04o}, others can write to or read it: expected 0600, or a"
                " group for 0660"
            )
        return
    if status.st_uid == euid and status.st_size == 0:
        return  # ours, and not finished
    if status.st_gid != group:
        raise SegmentError(
            f"{name} belongs to group {status.st_gid}, not to {group}: another peer was started"
            " without a group or with a different one"
        )
    if mode & 0o117:
        raise SegmentError(f"{name} has mode {mode:04o}: expected 0660")


def _check_content(fd: int, name: str, group: int | None) -> None:
    """Wait for a header that is being written, and write it if nobody does."""
    deadline = time.monotonic() + _CREATION_SECONDS
    while True:
        size = os.fstat(fd).st_size
        if 0 < size < layout.SEGMENT_SIZE:
            raise SegmentError(f"{name} has {size} bytes instead of {layout.SEGMENT_SIZE}")
        image = _read(fd) if size else bytes(layout.SEGMENT_SIZE)
        begun = _is_blank(image)
        if not begun:
            try:
                _check_header(image, name)
            except SegmentError:
                # A creator that begins with the magic and has not got any further.
                begun = image[: layout.HEADER_SIZE].rstrip(b"\0") == layout.MAGIC.rstrip(b"\0")
                if not begun or time.monotonic() >= deadline:
                    raise
            else:
                _allocate(fd)
                return
        elif time.monotonic() >= deadline:
            _initialise(fd, name, group)  # its creator died
            return
        time.sleep(0.005)


def _is_blank(image: bytes) -> bool:
    """Whether no header is there yet: the magic is written last, and slots are empty before."""
    numbers = image[layout.VERSION_AT : layout.HEADER_SIZE]
    return (
        not any(image[: layout.VERSION_AT])
        and int.from_bytes(numbers[:4], sys.byteorder) in (0, layout.VERSION)
        and int.from_bytes(numbers[4:], sys.byteorder) in (0, layout.SLOT_COUNT)
        and not any(image[layout.HEADER_SIZE : layout.SLOTS_END])
    )


def _check_header(image: bytes, name: str) -> None:
    if len(image) < layout.SEGMENT_SIZE:
        raise SegmentError(f"{name} has {len(image)} bytes instead of {layout.SEGMENT_SIZE}")
    magic = image[layout.MAGIC_AT : layout.MAGIC_AT + len(layout.MAGIC)]
    if magic != layout.MAGIC:
        raise SegmentError(f"{name} is not a GPU-share registry: it begins with {magic!r}")
    version, slots = (
        int.from_bytes(image[at : at + 4], sys.byteorder)
        for at in (layout.VERSION_AT, layout.SLOT_COUNT_AT)
    )
    if version > layout.VERSION:
        raise SegmentError(
            f"{name} has version {version} of the layout, this program knows version"
            f" {layout.VERSION}: update it"
        )
    if (version, slots) != (layout.VERSION, layout.SLOT_COUNT):
        raise SegmentError(
            f"{name} is damaged: version {version}, {slots} slots; once no peer runs, it can be"
            " removed"
        )


def _read(fd: int) -> bytes:
    """The memory as bytes. Not through a mapping where that can be helped: reading one that somebody
    truncates ends the process."""
    if _ON_LINUX:
        return os.pread(fd, layout.SEGMENT_SIZE, 0)
    if not os.fstat(fd).st_size:
        return b""
    with mmap.mmap(fd, layout.SEGMENT_SIZE, prot=mmap.PROT_READ) as mapping:
        return mapping[: layout.SEGMENT_SIZE]
