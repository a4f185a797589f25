"""turnstile: several GPU engines share one card, one at a time."""

__all__ = ["__version__"]

#: The version that is installed; "0+checkout" where nothing is. Looked up when it is asked for
#: (`importlib.metadata` takes longer to import than all that a decode loop needs from here).
__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        version = metadata.version("turnstile")
    except metadata.PackageNotFoundError:  # run from a plain checkout, nothing installed
        version = "0+checkout"
    globals()["__version__"] = version
    return version
