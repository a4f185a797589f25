"""Words in shared memory: native aligned loads and stores, and compare-and-swap.

Python has no compare-and-swap; libatomic does (Debian's package libatomic1, there on most systems since
gcc's libraries need it), and so does macOS's system library. Where neither is found, `compare_and_swap`
is a plain comparison followed by a store, `Words.lock_free` is False, and callers serialise by a file
lock: that serves among peers which all take the lock, and nobody else.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    #: (address, expected, new) -> whether the word was ``expected`` and now is ``new``
    Swap = Callable[[int, int, int], bool]

_SEQ_CST = 5  # __ATOMIC_SEQ_CST


class Words:
    """The words of a mapping, or of a copy of one, by byte offset.

    A load or a store of an aligned word is one instruction: memoryview copies the item with a memcpy of
    its constant size. `close` must come before the mapping's own.
    """

    def __init__(self, memory: mmap.mmap | bytes, swaps: tuple[Swap, Swap] | None) -> None:
        self.lock_free = swaps is not None
        self._swap32: Swap | None = None
        self._swap64: Swap | None = None
        if swaps is not None:
            self._swap32, self._swap64 = swaps
        self._bytes = memoryview(memory)
        self._u32 = self._bytes.cast("I")
        self._i64 = self._bytes.cast("q")
        self._f32 = self._bytes.cast("f")
        if swaps is not None:
            import ctypes

            anchor = ctypes.c_char.from_buffer(memory)
            self._address = ctypes.addressof(anchor)
            del anchor  # it would keep the mapping from being closed; its pages stay where they are

    def load_u32(self, at: int) -> int:
        return self._u32[at >> 2]

    def store_u32(self, at: int, value: int) -> None:
        self._u32[at >> 2] = value

    def load_i64(self, at: int) -> int:
        return self._i64[at >> 3]

    def store_i64(self, at: int, value: int) -> None:
        self._i64[at >> 3] = value

    def load_f32(self, at: int) -> float:
        return self._f32[at >> 2]

    def store_f32(self, at: int, value: float) -> None:
        self._f32[at >> 2] = value

    def load_bytes(self, at: int, size: int) -> bytes:
        """A copy; not atomic."""
        return self._bytes[at : at + size].tobytes()

    def store_bytes(self, at: int, value: bytes) -> None:
        """Not atomic."""
        self._bytes[at : at + len(value)] = value

    def swap_u32(self, at: int, expected: int, new: int) -> bool:
        """Store ``new`` if the word is ``expected``; say whether it was."""
        if self._swap32 is not None:
            return self._swap32(self._address + at, expected, new)
        if self.load_u32(at) != expected:
            return False
        self.store_u32(at, new)
        return True

    def swap_i64(self, at: int, expected: int, new: int) -> bool:
        """Store ``new`` if the word is ``expected``; say whether it was."""
        if self._swap64 is not None:
            return self._swap64(self._address + at, expected, new)
        if self.load_i64(at) != expected:
            return False
        self.store_i64(at, new)
        return True

    def close(self) -> None:
        """Let go of the mapping; the words cannot be used any more."""
        self._swap32 = self._swap64 = None
        for view in (self._u32, self._i64, self._f32, self._bytes):
            view.release()


_found: tuple[Swap, Swap] | None = None
_searched = False


def find_swaps() -> tuple[Swap, Swap] | None:
    """Compare-and-swap of 32 and of 64 bits that works between processes; None where there is none."""
    global _found, _searched
    if not _searched:
        for find in (_from_libatomic, _from_libsystem):
            _found = find()
            if _found is not None:
                break
        _searched = True
    return _found


def _from_libatomic() -> tuple[Swap, Swap] | None:
    import ctypes

    try:
        # A PyDLL keeps the interpreter's lock: each call is a few nanoseconds long.
        library = ctypes.PyDLL("libatomic.so.1")
        is_lock_free = library["__atomic_is_lock_free"]
        exchange32 = library["__atomic_compare_exchange_4"]
        exchange64 = library["__atomic_compare_exchange_8"]
    except (OSError, AttributeError):
        return None
    is_lock_free.argtypes = (ctypes.c_size_t, ctypes.c_void_p)
    is_lock_free.restype = ctypes.c_bool
    # Words that are not lock-free it guards with locks of this process, which are of no use to others.
    if not (is_lock_free(4, None) and is_lock_free(8, None)):
        return None

    def make(
        exchange: ctypes._NamedFuncPointer, kind: type[ctypes.c_uint32 | ctypes.c_int64]
    ) -> Swap:
        exchange.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            kind,
            ctypes.c_int,
            ctypes.c_int,
        )
        exchange.restype = ctypes.c_bool

        def swap(address: int, expected: int, new: int) -> bool:
            # On failure it writes what it found over the expected value.
            held = kind(expected)
            return bool(exchange(address, ctypes.addressof(held), new, _SEQ_CST, _SEQ_CST))

        return swap

    return _proven(make(exchange32, ctypes.c_uint32), make(exchange64, ctypes.c_int64))


def _from_libsystem() -> tuple[Swap, Swap] | None:
    import ctypes

    try:
        library = ctypes.PyDLL("libSystem.dylib")
        exchange32 = library["OSAtomicCompareAndSwap32Barrier"]
        exchange64 = library["OSAtomicCompareAndSwap64Barrier"]
    except (OSError, AttributeError):
        return None

    def make(
        exchange: ctypes._NamedFuncPointer, kind: type[ctypes.c_int32 | ctypes.c_int64]
    ) -> Swap:
        exchange.argtypes = (kind, kind, ctypes.c_void_p)
        exchange.restype = ctypes.c_bool

        def swap(address: int, expected: int, new: int) -> bool:
            return bool(exchange(expected, new, address))

        return swap

    return _proven(make(exchange32, ctypes.c_int32), make(exchange64, ctypes.c_int64))


def _proven(swap32: Swap, swap64: Swap) -> tuple[Swap, Swap] | None:
    """The two, if they do what they should on memory of our own."""
    import ctypes

    for swap, word in ((swap32, ctypes.c_uint32(7)), (swap64, ctypes.c_int64(7))):
        address = ctypes.addressof(word)
        if swap(address, 8, 9) or word.value != 7 or not swap(address, 7, 9) or word.value != 9:
            return None
    return swap32, swap64
