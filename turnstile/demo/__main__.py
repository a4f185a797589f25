"""``python -m turnstile.demo``: see ``--help``."""

from __future__ import annotations

import signal

if (
    __name__ == "__main__"
):  # what follows takes a moment, in which Ctrl-C should not show a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import random
import sys
from typing import Any

from twisted.internet.defer import (
    Deferred,
    DeferredList,
    FirstError,
    ensureDeferred,
)
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)

from turnstile import log as tlog
from turnstile.demo.show import Show, Traffic
from turnstile.demo.stage import Stage
from turnstile.demo.story import Story


def parse(arguments: list[str]) -> argparse.Namespace:
    """The demo's own options."""
    parser = argparse.ArgumentParser(
        prog="script/demo",
        description="A simulated 16 GiB card with engines on it, and turnstile in front: chats stream,"
        " image jobs come in, and the terminal shows what the card does, until Ctrl-C.",
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        default=("ollama", "comfyui"),
        help="which engines, with commas between: ollama, llama, comfy, sd (default: ollama,comfy)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="tell one story, chat -> image -> chat, step by step; exit 0 only if every step came out right",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how fast simulated time goes (default 1)"
    )
    for option, what in (
        ("ollama", "Ollama"),
        ("llama", "llama.cpp"),
        ("comfy", "ComfyUI"),
        ("sd", "sd-server"),
    ):
        parser.add_argument(
            f"--{option}-port",
            type=int,
            default=0,
            help=f"turnstile's port for clients of {what} (default: any)",
        )
    parser.add_argument(
        "--quiet", action="store_true", help="no traffic of its own: try your clients on it"
    )
    options = parser.parse_args(arguments)
    if not 0.01 <= options.speed <= 1000:
        parser.error("--speed must be between 0.01 and 1000")
    return options


#: What people call the engines.
_NAMES = {
    "ollama": "ollama",
    "llama": "llamacpp",
    "llamacpp": "llamacpp",
    "llama.cpp": "llamacpp",
    "comfy": "comfyui",
    "comfyui": "comfyui",
    "sd": "sd",
    "sd-server": "sd",
}


def _engines(text: str) -> tuple[str, ...]:
    """The engines that a list names."""
    names = [name.strip().lower() for name in text.split(",")]
    unknown = [name for name in names if name not in _NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such engine: {', '.join(unknown)}")
    return tuple(_NAMES[name] for name in names)


def main() -> None:
    """Run the demo; exits 0 if all went well."""
    options = parse(sys.argv[1:])
    from twisted.internet import reactor as installed

    reactor: Any = installed
    # The picture tells of everything else.
    tlog.set_level("error")
    observer = FilteringLogObserver(
        textFileLogObserver(sys.stderr), [LogLevelFilterPredicate(LogLevel.error)]
    )
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)
    codes: list[int] = []
    stop: Deferred[None] = Deferred()

    def interrupted(*_: object) -> None:
        reactor.callFromThread(_fire, stop)

    def run() -> None:
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, interrupted)
        task = _once(reactor, options, stop) if options.once else _live(reactor, options, stop)
        d = ensureDeferred(task)
        d.addCallbacks(codes.append, _crashed)
        d.addBoth(lambda _: reactor.stop())

    def _crashed(failure: Any) -> None:
        if failure.check(BrokenPipeError):
            # Whoever looked on is gone (script/demo | head); nothing more can be said, not even at the exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            codes.append(128 + signal.SIGPIPE)
            return
        failure.printTraceback(file=sys.stderr)
        codes.append(1)

    reactor.callWhenRunning(run)
    reactor.run()
    raise SystemExit(codes[0] if codes else 1)


def _fire(d: Deferred[None]) -> None:
    if not d.called:
        d.callback(None)


async def _start(reactor: Any, options: argparse.Namespace) -> Stage:
    ports = {
        "ollama": options.ollama_port,
        "llamacpp": options.llama_port,
        "comfyui": options.comfy_port,
        "sd": options.sd_port,
    }
    stage = Stage(reactor, options.speed, options.engines, ports)
    await stage.start()
    titles = stage.titles
    width = max(map(len, titles.values()))
    for name in stage.engines:
        itself = "the engine itself" if name != "sd" else "the engine itself, while it runs"
        print(
            f"{titles[name]:{width}} through turnstile: {stage.url(name)}   ({itself}: {stage.engine_url(name)})"
        )
    state = f"{stage.url(stage.engines[0])}/turnstile/state"
    print(f"{'state:':{width + len(' through turnstile:')}} {state}\n", flush=True)
    return stage


async def _once(reactor: Any, options: argparse.Namespace, stop: Deferred[None]) -> int:
    stage = await _start(reactor, options)
    story = ensureDeferred(Story(stage, lambda line: print(line, flush=True)).run())
    stop.addCallback(lambda _: story.cancel())
    try:
        await story
    except BrokenPipeError:
        raise
    except Exception as error:
        if stop.called:  # where it was when it was cancelled decides what the error is
            print("\nstopped before the end", flush=True)
            code = 128 + signal.SIGINT
        else:
            print(f"\nWRONG: {error or type(error).__name__}", flush=True)
            code = 1
    else:
        print("\nevery step came out right", flush=True)
        code = 0
    finally:
        await stage.stop()
    return code


async def _live(reactor: Any, options: argparse.Namespace, stop: Deferred[None]) -> int:
    stage = await _start(reactor, options)
    traffic = Traffic(stage, random.Random())
    live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    show = Show(stage, traffic, sys.stdout, live, tlog.wants_colour(live, os.environ))
    if not options.quiet:
        traffic.start()
    try:
        await DeferredList(
            [show.start(), stop], fireOnOneCallback=True, fireOnOneErrback=True, consumeErrors=True
        )
    except FirstError as error:
        error.subFailure.raiseException()
    finally:
        show.stop()
        traffic.stop()
        await stage.stop()
    print("\nstopped", flush=True)
    return 0


if __name__ == "__main__":
    main()
