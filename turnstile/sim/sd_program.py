"""The simulated sd-server as a program: a real process with a real port.

It takes the options of the real one that matter here (``--listen-ip``, ``--listen-port``), and some
of its own.  With ``--card`` it holds its memory in another process's card, see `card_server`; it
ends when that one does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, connectionDone
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from .card import GIB, Card
from .card_server import RemoteCard, encode, split
from .exchange import Exchange
from .sd_worker import FAILED, Orders, Render, progress_bar
from .sdserver import SdSim
from .server import _Factory

#: Options that are the same as those of `SdSim`.
NUMBERS = (
    "speed",
    "load-time",
    "steps",
    "condition-time",
    "step-time",
    "decode-time",
    "image-bytes",
)
SWITCHES = (
    "crash-loading",
    "hang-loading",
    "exit-in-render",
    "hang-render",
    "fail-render",
    "ignore-sigterm",
    "grandchild",
)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line: what is known of it, and the rest, which the real one may know."""
    parser = argparse.ArgumentParser(
        prog="python -m turnstile.sim.sdserver", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("-l", "--listen-ip", default="127.0.0.1")
    parser.add_argument("--listen-port", type=int, default=1234)
    parser.add_argument("--card", help="address of the card's server (default: a card of its own)")
    parser.add_argument("--model-gib", type=float, help="memory of the card that the model takes")
    parser.add_argument("--port-delay", type=float, help="seconds from the model to the port")
    parser.add_argument("--load-seconds", dest="load_time", type=float)
    parser.add_argument("--step-seconds", dest="step_time", type=float)
    for name in NUMBERS:
        number = int if name in ("steps", "image-bytes") else float
        parser.add_argument(f"--{name}", type=number, help=argparse.SUPPRESS)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=None, help="misbehave")
    # A grandchild's only option: how much it holds.
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def chosen(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the command line says of the options of `SdSim`, and of its orders."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    names = {name.replace("-", "_") for name in NUMBERS} | {"load_time", "step_time"}
    sim = {name: value for name, value in given.items() if name in names}
    if options.model_gib is not None:
        sim["model_bytes"] = int(options.model_gib * GIB)
    switches = {name.replace("-", "_") for name in SWITCHES} | {"port_delay"}
    return sim, {name: value for name, value in given.items() if name in switches}


def say(line: str) -> None:
    """The log goes to standard output."""
    print(line, flush=True)


def leave(status: int) -> None:
    """End the process, by a signal if ``status`` is below zero."""
    sys.stdout.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else FAILED)


class SdProgram(SdSim):
    """`SdSim` whose process is this one."""

    def __init__(self, *args: Any, tell: Any, card_address: str | None, **options: Any) -> None:
        super().__init__(*args, say=say, **options)
        self._tell = tell
        self._card_address = card_address

    def start_listening(self) -> None:
        # As cpp-httplib does, which lets two of its servers share a port.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                listener.bind((self.host, self.port))
                listener.listen(1024)
            except OSError as error:
                say(f"[ERROR] main.cpp:250  - couldn't bind to {self.host}:{self.port}: {error}")
                leave(FAILED)
            listener.setblocking(False)
            reactor: Any = self.clock
            self._listening = reactor.adoptStreamPort(
                listener.fileno(), socket.AF_INET, _Factory(self)
            )

    def show_progress(self, step: int, steps: int) -> None:
        # Drawn over what was there, as on a terminal.
        end = "\n" if step == steps else ""
        print("\r" + progress_bar(step, steps, self.step_time), end=end, flush=True)

    def obey(self) -> None:
        """Do what the orders say from the start."""
        if self.orders.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def exit(self, status: int) -> Deferred[None]:
        leave(status)
        return succeed(None)

    def begin_grandchild(self) -> None:
        command = [sys.executable, "-m", "turnstile.sim.sdserver"]
        command += ["--hold", str(self.grandchild_bytes), "--card", self._card_address or ""]
        if self.orders.ignore_sigterm:
            command.append("--ignore-sigterm")
        subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def begin(self, exchange: Exchange) -> None:
        self._tell(request=exchange.method, target=exchange.target.decode("latin-1"))
        super().begin(exchange)

    def opened(self) -> None:
        self._tell(state="up")

    def begun(self, render: Render) -> None:
        self._tell(render=render.kind)

    def finished(self, render: Render) -> None:
        self._tell(rendered=render.kind)


class CardLink(LineOnlyReceiver):
    """The connection to the card's server."""

    delimiter = b"\n"
    MAX_LENGTH = 1 << 20

    def __init__(self, program: Program) -> None:
        self._program = program

    def connectionMade(self) -> None:
        role = "main" if self._program.options.hold is None else "grandchild"
        self.send(hello=os.getpid(), owner="sd", role=role, command=sys.argv)
        self._program.linked(self)

    def send(self, **message: Any) -> None:
        self.transport.write(encode(**message))  # type: ignore[union-attr]

    def lineReceived(self, line: bytes) -> None:
        message = json.loads(line)
        if "options" in message:
            self._program.start(message["options"], message["orders"])
        elif "orders" in message:
            self._program.order(message["orders"])
            self.send(obeyed=True)
        elif "exit" in message:
            leave(message["exit"])
        elif "oom" in message:
            say("[ERROR] ggml_extend.hpp:83   - cudaMalloc failed: out of memory")
            leave(FAILED)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        leave(0)


class Program:
    """The process: what it was told, and the server that it is."""

    def __init__(self, reactor: Any, options: argparse.Namespace) -> None:
        self.reactor = reactor
        self.options = options
        self._sim: SdProgram | None = None
        self._link: CardLink | None = None

    def begin(self) -> None:
        """Find the card, then start."""
        if self.options.card is None:
            self.start({}, {})
            return
        factory: Factory = Factory.forProtocol(lambda: CardLink(self))
        factory.noisy = False
        host, port = split(self.options.card)
        connecting = TCP4ClientEndpoint(self.reactor, host, port).connect(factory)
        connecting.addErrback(self._no_card)

    def _no_card(self, failure: Failure) -> None:
        say(f"[ERROR] no card at {self.options.card}: {failure.getErrorMessage()}")
        leave(FAILED)

    def linked(self, link: CardLink) -> None:
        """The connection to the card is there; the rest is told by the card's server."""
        self._link = link
        if self.options.hold is not None:
            if self.options.ignore_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            link.send(hold="grandchild", bytes=self.options.hold)

    def start(self, options: dict[str, Any], orders: dict[str, Any]) -> None:
        """Load the model."""
        own, ordered = chosen(self.options)
        link = self._link
        card = Card(self.reactor)
        if link is not None and link.transport is not None:
            card = RemoteCard(self.reactor, link.transport.write)
        self._sim = sim = SdProgram(
            card,
            self.reactor,
            tell=_mute if link is None else link.send,
            card_address=self.options.card,
            orders=Orders(**{**orders, **ordered}),
            **{**options, **own},
        )
        sim.obey()
        sim.listen(self.options.listen_port, self.options.listen_ip)

    def order(self, changes: dict[str, Any]) -> None:
        """Misbehave otherwise from now on."""
        assert self._sim is not None
        for name, value in changes.items():
            setattr(self._sim.orders, name, value)
        self._sim.obey()


def _mute(**message: Any) -> None:
    """Nobody to tell."""


def main() -> None:
    """Run until a signal ends it."""
    options, rest = parse(sys.argv[1:])
    from twisted.internet import reactor as installed

    reactor: Any = installed
    # The real one has no handlers: a signal ends it wherever it is.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if rest:
        say(f"[WARN ] ignored here: {' '.join(rest)}")
    reactor.callWhenRunning(Program(reactor, options).begin)
    reactor.run(installSignalHandlers=False)
