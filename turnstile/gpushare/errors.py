"""What can go wrong, for callers that want to tell it apart."""


class GpuShareError(Exception):
    """Why a process cannot take part; the message says what to do about it."""


class GpuKeyError(GpuShareError):
    """It is not clear which card is meant."""


class SegmentError(GpuShareError):
    """The shared memory is not to be had, not ours to use, or not what it should be."""


class RegistryFullError(GpuShareError):
    """All 16 slots belong to live processes."""
