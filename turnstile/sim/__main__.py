"""``python -m turnstile.sim``: the simulated host on its own."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import react

from .card import GIB
from .host import GpuHost


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m turnstile.sim", description=__doc__)
    parser.add_argument("--ollama-port", type=int, default=11435)
    parser.add_argument("--comfy-port", type=int, default=8189)
    parser.add_argument("--interface", default="127.0.0.1")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds a real one")
    parser.add_argument("--total-gib", type=float, default=16.0, help="memory of the card")
    options = parser.parse_args(argv)
    if options.speed <= 0:
        parser.error("--speed must be above zero")
    return options


async def main(reactor: Any, *argv: str) -> None:
    """Run until the reactor is told to stop."""
    options = parse(list(argv))
    host = GpuHost(
        reactor,
        options.speed,
        int(options.total_gib * GIB),
        ollama_port=options.ollama_port,
        comfy_port=options.comfy_port,
        interface=options.interface,
    )
    try:
        await host.start()
    except CannotListenError as error:
        sys.exit(str(error))
    print(f"ollama {host.ollama.url}", flush=True)
    print(f"comfyui {host.comfy.url}", flush=True)
    reactor.addSystemEventTrigger("before", "shutdown", host.stop)
    await Deferred()


if __name__ == "__main__":
    react(lambda reactor: Deferred.fromCoroutine(main(reactor, *sys.argv[1:])))
