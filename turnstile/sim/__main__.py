"""``python -m turnstile.sim``: the simulated host on its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import react

from .card import GIB
from .host import GpuHost

ENGINES = ("ollama", "comfy", "llama", "sd")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m turnstile.sim", description=__doc__)
    parser.add_argument(
        "--engines",
        type=engines,
        default=("ollama", "comfy"),
        help=f"which, with commas between (default: ollama,comfy; all: {','.join(ENGINES)})",
    )
    parser.add_argument("--ollama-port", type=int, default=11435)
    parser.add_argument("--comfy-port", type=int, default=8189)
    parser.add_argument("--llama-port", type=int, default=8081)
    parser.add_argument("--interface", default="127.0.0.1")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds a real one")
    parser.add_argument("--total-gib", type=float, default=16.0, help="memory of the card")
    options = parser.parse_args(argv)
    if options.speed <= 0:
        parser.error("--speed must be above zero")
    return options


def engines(text: str) -> tuple[str, ...]:
    """The engines that a list names; ``llamacpp`` and ``comfyui`` are other names for two."""
    names = [name.strip() for name in text.split(",")]
    names = [{"comfyui": "comfy", "llamacpp": "llama"}.get(name, name) for name in names]
    unknown = sorted(set(names) - set(ENGINES))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such engine: {', '.join(unknown)}")
    return tuple(name for name in ENGINES if name in names)


async def main(reactor: Any, *argv: str) -> None:
    """Run until the reactor is told to stop."""
    options = parse(list(argv))
    enabled = {name: name in options.engines for name in ENGINES}
    host = GpuHost(
        reactor,
        options.speed,
        int(options.total_gib * GIB),
        ollama=enabled["ollama"],
        comfy=enabled["comfy"],
        llama=enabled["llama"],
        sd=enabled["sd"],
        ollama_port=options.ollama_port,
        comfy_port=options.comfy_port,
        llama_port=options.llama_port,
        interface=options.interface,
    )
    try:
        await host.start()
    except CannotListenError as error:
        sys.exit(str(error))
    for name, shown in (("ollama", "ollama"), ("comfy", "comfyui"), ("llama", "llamacpp")):
        if enabled[name]:
            print(f"{shown} {getattr(host, name).url}", flush=True)
    if enabled["sd"]:
        # Nobody starts it but its owner.
        program, *arguments = host.sd_command
        print(f"sd {host.sd_url}", flush=True)
        print(f"sd-bin {program}", flush=True)
        print(f"sd-args {shlex.join(arguments)}", flush=True)
    reactor.addSystemEventTrigger("before", "shutdown", host.stop)
    await Deferred()


if __name__ == "__main__":
    react(lambda reactor: Deferred.fromCoroutine(main(reactor, *sys.argv[1:])))
