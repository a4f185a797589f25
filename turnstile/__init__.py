"""turnstile: several GPU engines share one card, one at a time."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("turnstile")
except _metadata.PackageNotFoundError:  # run from a plain checkout, nothing installed
    __version__ = "0+checkout"
del _metadata

__all__ = ["__version__"]
