"""``twistd turnstile``: the options, made from the table in `turnstile.config`, and the wiring."""

import contextlib
import gc
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, MutableMapping
from typing import IO, Any, NoReturn

from twisted.application.service import MultiService
from twisted.logger import ILogObserver
from twisted.python import usage
from twisted.python.components import Componentized

from turnstile import __version__, exitcode, notify
from turnstile.config import DEFAULT_FILE, FILE_VARIABLE, SETTINGS, Config, ConfigError, load
from turnstile.log import (
    LogFile,
    Observer,
    Sink,
    StreamSink,
    SyslogSink,
    escape,
    make_observer,
    prepare_switch,
)


def _fail(message: str) -> NoReturn:
    """Say it in one line and leave; twistd would add a page of help."""
    print(f"turnstile: {escape(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(exitcode.EXIT_CONFIG)


def _parameters() -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    for setting in SETTINGS:
        for option in (setting.option, *setting.option_aliases):
            rows.append([option, None, None, setting.help])
    rows.append(["config", None, None, "The configuration file."])
    return rows


class Options(usage.Options):
    """Every setting as an option; values are checked once all are known."""

    optParameters = _parameters()
    synopsis = "[options]"

    #: The configuration, after `postOptions`.
    config: Config

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ
        super().__init__()  # type: ignore[no-untyped-call]

    def parseOptions(self, options: Any = None) -> None:
        """Parse; anything wrong ends the process with one line."""
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except usage.UsageError as error:
            _fail(f"{error} (see twistd turnstile --help)")

    def parseArgs(self, *args: str) -> None:
        """There are no arguments but options."""
        if args:
            raise usage.UsageError(f"{args[0]!r} is not an option")

    def postOptions(self) -> None:
        """Put the configuration together."""
        try:
            self.config = load(self, self.environ)
        except ConfigError as error:
            _fail(str(error))

    def opt_version(self) -> NoReturn:
        """Print turnstile's version and exit."""
        print(f"turnstile {__version__}")
        raise SystemExit(0)

    def getUsage(self, width: int | None = None) -> str:
        """The help: each option with its variable, its default and its meaning."""
        width = max(40, width or _columns(self.environ))
        lines = [
            "Options; each is an environment variable and a line of the file as well:",
            "",
        ]
        for setting in SETTINGS:
            names = ", ".join(f"--{name}" for name in (setting.option, *setting.option_aliases))
            variables = ", ".join((setting.env, *setting.env_aliases))
            default = setting.default or "empty"
            lines.append(f"  {names} {setting.kind.metavar}")
            lines += textwrap.wrap(
                f"{setting.help} [{variables}; default: {default}]",
                width,
                initial_indent="        ",
                subsequent_indent="        ",
                break_on_hyphens=False,
                break_long_words=False,
            )
        lines += [
            "  --config FILE",
            f"        The configuration file, KEY=VALUE lines. [{FILE_VARIABLE}; default:",
            f"        {DEFAULT_FILE}, if it exists]",
            "  --version",
            "        Print turnstile's version and exit.",
            "  --help",
            "        Print this help and exit.",
            "",
            "An option wins over an environment variable, that over the file. Durations are",
            "written 500ms, 1m30s, 1.5h, or in seconds. An empty value means the default.",
            "",
        ]
        return "\n".join(lines)


def _columns(environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and len(columns) < 5 else 80


class Root(MultiService):
    """What twistd starts. Brings the log observer along, so that twistd makes none of its own.

    :param twistd: twistd's own options.
    """

    def __init__(
        self, observer: Observer | None, reactor: Any, twistd: MutableMapping[str, Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._reactor = reactor
        self._twistd = twistd

    def startService(self) -> None:
        """Called by twistd before the reactor runs."""
        exitcode.exit_0_on_sigterm(self._reactor)
        exitcode.hasten_on_second_sigint(self._reactor, lambda: bool(self.running), self._hasten)
        super().startService()  # type: ignore[no-untyped-call]
        # What was imported stays: looking through it for garbage again and again would stop all streams for 20 ms.
        gc.freeze()
        if exitcode.get_failure():
            self._tell_parent(exitcode.get_failure())

    def _hasten(self) -> None:
        for service in self:
            getattr(service, "hasten", _nothing)()

    def _tell_parent(self, reason: str) -> None:
        """Let the process that became a daemon, and waits to hear of it, print ``reason`` and exit 1."""
        pipe = self._twistd.get("statusPipe")
        if pipe is None:
            return
        self._twistd["statusPipe"] = None  # else twistd tells it that all is well
        with contextlib.suppress(OSError):
            # It reads 100 bytes at most.
            os.write(pipe, b"1 " + escape(reason).encode("ascii", "replace")[:98])
            os.close(pipe)

    def setServiceParent(self, parent: Any) -> None:
        """Called by twistd with the application, before logging begins."""
        if self._observer is not None and isinstance(parent, Componentized):
            parent.setComponent(ILogObserver, self._observer)
        super().setServiceParent(parent)  # type: ignore[no-untyped-call]


def _nothing() -> None:
    """There is nothing to hasten."""


def _check_pid_file(twistd: Mapping[str, Any]) -> None:
    """Where twistd can't write its pid file, which it does by default, it answers with a page of traceback."""
    path = twistd.get("pidfile")
    if not path or os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        return
    raise ConfigError(f"pid file {path}: can't be written (twistd --pidfile= does without)")


def _log_sink(twistd: Mapping[str, Any], stdout: IO[Any], stderr: IO[Any]) -> tuple[Sink, bool]:
    """Where twistd's own options send the log, and whether that is a terminal."""
    if twistd.get("syslog"):
        return SyslogSink(twistd.get("prefix") or "turnstile"), False
    logfile = twistd.get("logfile")
    # An Options of its own (tests, other runners) has no parent: not a daemon.
    foreground = bool(twistd.get("nodaemon", not twistd)) or bool(twistd.get("debug"))
    if logfile == "-" and not foreground:
        raise ConfigError("a daemon can't log to standard output (--logfile=-)")
    if logfile and logfile != "-":
        return LogFile(logfile), False
    if not foreground:
        return LogFile("twistd.log"), False
    stream = stdout if logfile == "-" else stderr
    return StreamSink(stream), stream.isatty()


def makeService(options: Options, reactor: Any = None) -> MultiService:
    """The service that twistd runs, made from parsed ``options``."""
    config = options.config
    twistd: MutableMapping[str, Any] = options.parent if options.parent is not None else {}
    from turnstile import activation
    from turnstile.service import TurnstileService
    from turnstile.supervise import Supervisor

    if reactor is None:
        from twisted.internet import reactor
    # As they are now: twistd soon puts the log in their places.
    streams = sys.stdout, sys.stderr
    # What systemd tells a process is for no child of it.
    is_real = options.environ is os.environ
    environ: MutableMapping[str, str] = os.environ if is_real else dict(options.environ)
    initial = activation.initial_environment() if is_real else {}
    try:
        manager = notify.take_environment(environ, os.getpid())
        sockets = activation.take_environment(environ, os.getpid(), initial)
        _check_pid_file(twistd)
        service = TurnstileService(config, reactor=reactor, sockets=sockets)
        if config.log_file is not None:
            sink: Sink = StreamSink(streams[1])
            isatty = False
        else:
            sink, isatty = _log_sink(twistd, *streams)
        observer = make_observer(config, sink, isatty, options.environ)
    except ConfigError as error:
        _fail(str(error))
    root = Root(observer, reactor, twistd)
    service.setServiceParent(root)  # type: ignore[no-untyped-call]

    def open_log(new: Config) -> Callable[[], None]:
        return prepare_switch(observer, new, lambda: _log_sink(twistd, *streams), options.environ)

    supervisor = Supervisor(
        service, reactor, manager, lambda: load(options, options.environ), open_log
    )
    supervisor.setServiceParent(root)  # type: ignore[no-untyped-call]
    return root
