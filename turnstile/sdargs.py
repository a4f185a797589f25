"""What sd-server's command line says about where it listens, and what in it is known to do harm. Pure.

Options and defaults are those of stable-diffusion.cpp's ``examples/server`` (``--listen-ip``, ``-l``, 127.0.0.1;
``--listen-port``, 1234).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from turnstile.addresses import Upstream, is_loopback

#: Where sd-server listens if it isn't told.
DEFAULT_PORT = 1234
#: The program whose options are known; a wrapper of another name may take none of them.
PROGRAM = "sd-server"


def _value(args: Sequence[str], *names: str) -> str | None:
    """The value of an option, the last one if it is given more than once."""
    found = None
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            if equals:
                found = value
            elif index + 1 < len(args):
                found = args[index + 1]
    return found


def listen_port(args: Sequence[str]) -> int | None:
    """The port that ``args`` has sd-server listen on; None if they don't say."""
    text = _value(args, "--listen-port")
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def knows(program: str) -> bool:
    """Whether ``program`` is sd-server by its name."""
    return os.path.basename(program) == PROGRAM


def with_address(program: str, args: Sequence[str], url: Upstream) -> tuple[str, ...]:
    """``args``, and the address of ``url`` where they name none and the program is known to take one."""
    if not knows(program) or _value(args, "--listen-port") is not None:
        return tuple(args)
    added = ["--listen-port", str(url.port)]
    if _value(args, "--listen-ip", "-l") is None and url.host not in ("127.0.0.1", "localhost"):
        added = ["--listen-ip", url.host, *added]
    return (*args, *added)


def warnings(program: str, args: Sequence[str], url: Upstream) -> list[str]:
    """What is to be said about a command line at start."""
    found = []
    if any(arg.partition("=")[0] == "--params-backend" for arg in args):
        found.append(
            "SD_ARGS has --params-backend, which disables sd-server's --auto-fit: a decode that is"
            " too large for the card is not cut into tiles any more and fails (--backend is safe)"
        )
    if any(arg.startswith(("~", "$")) for arg in args):
        found.append("SD_ARGS has ~ or $: no shell reads it, so write whole paths")
    port = listen_port(args)
    if port is None and not knows(program) and url.port != DEFAULT_PORT:
        found.append(
            f"SD_ARGS names no --listen-port: sd-server would listen on {DEFAULT_PORT}, SD_URL says"
            f" {url.port}"
        )
    elif port is not None and port != url.port:
        found.append(f"SD_ARGS has sd-server listen on port {port}, SD_URL says {url.port}")
    if not is_loopback(url.host):
        found.append(
            f"SD_URL ({url.url}) is not this machine by its address; turnstile starts sd-server here"
        )
    return found
