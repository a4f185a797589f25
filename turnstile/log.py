"""The log: twisted.logger events as lines for people or JSON objects.

Everything that an event carries is escaped (no control characters, so nobody forges lines or
drives a terminal) and searched for secrets before it is written; nothing in here raises because of
what is logged. Levels are checked before an event is built: `Logger` methods return at once when
theirs is off, and `info_enabled` and `debug_enabled` are there for hot paths.
"""

import contextlib
import json
import math
import os
import re
import signal
import string
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from twisted.logger import ILogObserver, LogLevel, formatEvent
from twisted.logger import Logger as _TwistedLogger
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.config import Config, ConfigError

if TYPE_CHECKING:
    from constantly import NamedConstant

#: Whether events of these levels are written; both are True until `set_level` is called.
info_enabled = True
debug_enabled = True

_RANKS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "critical": 50}
_rank = 0
_LONGEST = 8192
_DEEPEST = 6


def set_level(name: str) -> None:
    """Let events of level ``name`` (error, warn, info, debug) and above through, from now on."""
    global _rank, debug_enabled, info_enabled
    _rank = _RANKS[name]
    info_enabled = _rank <= _RANKS["info"]
    debug_enabled = _rank <= _RANKS["debug"]


class Logger(_TwistedLogger):
    """twisted's Logger that builds no event when its level is off.

    ``turnstile_always=True`` writes an event at any level.
    """

    def emit(self, level: "NamedConstant", format: str | None = None, **kwargs: object) -> None:
        """Send an event on its way, if its level is on."""
        if _RANKS.get(level.name, 50) >= _rank or "turnstile_always" in kwargs:
            super().emit(level, format, **kwargs)


# -- secrets ---------------------------------------------------------------------------------------

_SECRET_WORDS = (
    "token|secret|password|passwd|pwd|api[-_.]?key|access[-_.]?key|credential|signature|jwt"
    "|session[-_.]?id"
)
_SECRET_NAME = re.compile(
    rf"{_SECRET_WORDS}|key\Z|\Ax?auth(?:orization)?\Z|\A(?:pass|sig|sas|sid|session)\Z"
)
_MASK = "***"
_LOOSE_SECRETS = re.compile(
    # query parameters wherever they appear
    r"(?P<head>[?&;](?P<name>[^=&;?\s\"'<>]+)=)[^&;?\s\"'<>]+"
    # headers, as text or as they look when printed as Python values
    r"|(?P<header>(?:authorization|cookie)\b['\"]?\s{0,4}[:=,]\s{0,4})"
    r"(?:\[?b?(?:'[^']*'|\"[^\"]*\")|[^\r\n]+)"
    r"|(?P<bearer>\bBearer\s{1,4})[^\s\"',]+"
    # user:password@ in URLs
    r"|(?P<url>://)[^/@\s\"']+(?=@)",
    re.IGNORECASE,
)
# The same in request targets, where it may be percent-encoded.
_USER_INFO = re.compile(r"((?:/|%2F){2})(?:[^/?#&;\s%@]|%(?!2F|40))*(?:@|%40)", re.IGNORECASE)
_SECRET_FIELDS = re.compile(r"(?:.*_)?(?:authorization|cookies?|password|secret|token|headers)\Z")


def _scrub(text: str) -> str:
    """``text`` with what looks like a secret masked: the net below careful callers."""
    return _LOOSE_SECRETS.sub(_mask_loose, text)


def _mask_loose(match: re.Match[str]) -> str:
    name = match["name"]
    if name is not None and not _SECRET_NAME.search(unquote_plus(name).lower()):
        return _USER_INFO.sub(rf"\1{_MASK}@", match[0])
    return (match["head"] or match["header"] or match["bearer"] or match["url"]) + _MASK


def redact_target(target: bytes) -> str:
    """A request target for the log: escaped, without the values of secret query parameters."""
    text = target.decode("ascii", "backslashreplace")
    if "@" in text or "%40" in text:
        text = _USER_INFO.sub(rf"\1{_MASK}@", text)
    path, mark, query = text.partition("?")
    if mark:
        pieces = re.split("([&;])", query)
        pieces[::2] = [_redact_parameter(piece) for piece in pieces[::2]]
        text = path + mark + "".join(pieces)
    return escape(text)


def _redact_parameter(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if equals and value and _SECRET_NAME.search(unquote_plus(name).strip().lower()):
        return f"{name}={_MASK}"
    return parameter


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _printable(text: str) -> str:
    return escape(_scrub(_cut(text)))


def escape(text: str) -> str:
    """``text`` on one line and printable, cut if it is very long."""
    text = _cut(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char) or (
        f"\\x{ord(char):02x}"
        if char < "\x80"
        else f"\\u{ord(char):04x}"
        if char < "\U00010000"
        else f"\\U{ord(char):08x}"
    )


# -- events ----------------------------------------------------------------------------------------

_OURS = ("turnstile", "twisted.plugins.turnstile")
_HIDDEN = frozenset(
    "time system message isError failure why format printed logLevel log_text".split()
)


@lru_cache(maxsize=512)
def _names_in(format: str) -> frozenset[str]:
    """The fields that a message shows itself."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(format) if name]
    except ValueError:
        return frozenset()
    return frozenset(re.split(r"[.\[(]", name, maxsplit=1)[0] for name in names)


def _fields(event: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, value in event.items()
        if not key.startswith(("log_", "turnstile_")) and key not in _HIDDEN
    ]


def _text(value: Any) -> str:
    """``value`` as text, whatever it is."""
    try:
        if isinstance(value, str):
            return value
        if isinstance(value, bytes):
            return value.decode("utf-8", "backslashreplace")
        if isinstance(value, float):
            return f"{value:.6g}" if abs(value) < 1e6 else repr(value)
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that can't be printed: {type(error).__name__}>"


def _message(event: Mapping[str, Any]) -> str:
    try:
        return formatEvent(dict(event))
    except Exception as error:  # formatEvent promises not to; an odd mapping may
        return f"<event that can't be formatted: {type(error).__name__}>"


def _traceback(event: Mapping[str, Any]) -> str:
    failure = event.get("log_failure")
    if not isinstance(failure, Failure):
        return ""
    try:
        return failure.getTraceback()
    except Exception as error:
        return f"<traceback that can't be printed: {type(error).__name__}>"


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` as what JSON knows."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else hex(value)  # more than most readers take
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth < _DEEPEST:
        try:
            if isinstance(value, Mapping):
                return {
                    _clean(_text(key)): _field(_text(key), item, depth + 1)
                    for key, item in value.items()
                }
            if isinstance(value, list | tuple | set | frozenset):
                return [_plain(item, depth + 1) for item in value]
        except Exception as error:
            return f"<{type(value).__name__} that can't be read: {type(error).__name__}>"
    return _clean(_text(value))


def _field(name: str, value: Any, depth: int = 0) -> Any:
    return _MASK if _SECRET_FIELDS.match(name.lower()) else _plain(value, depth)


def _clean(text: str) -> str:
    text = _cut(text)
    # Lone surrogates are no characters; most JSON readers refuse them.
    return _scrub(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _timestamp(seconds: Any) -> str:
    try:
        whole = math.floor(seconds)
        millis = int((seconds - whole) * 1000)
        return f"{_second(whole)}.{millis:03d}Z"
    except (TypeError, ValueError, OverflowError, OSError):
        return "0000-00-00T00:00:00.000Z"


@lru_cache(maxsize=4)
def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def _level_of(event: Mapping[str, Any]) -> str:
    """The level that an event is written at: what others merely mention is debug."""
    level = getattr(event.get("log_level"), "name", "info")
    if level == "critical":
        return "error"
    if level == "info" and not str(event.get("log_namespace", "")).startswith(_OURS):
        return "debug"
    return level if level in _RANKS else "info"


def render_json(event: Mapping[str, Any], level: str) -> str:
    """One JSON object, without a line end."""
    line: dict[str, Any] = {
        "time": _timestamp(event.get("log_time")),
        "level": level,
        "namespace": _clean(_text(event.get("log_namespace", ""))),
        "msg": _clean(_message(event)),
    }
    for key, value in _fields(event):
        line[f"{key}_" if key in line or key == "traceback" else key] = _field(key, value)
    if traceback := _traceback(event):
        line["traceback"] = _scrub(traceback.encode("utf-8", "backslashreplace").decode("utf-8"))
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"))


_RESET = "\x1b[0m"
_CYAN, _GREEN, _YELLOW, _RED = "\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[31m"
_LEVEL_COLOURS = {"error": _RED, "warn": _YELLOW}


def _status_colour(status: Any) -> str:
    if not isinstance(status, int) or status < 100 or status >= 500:
        return _RED
    return _GREEN if status < 400 else _YELLOW


def render_text(event: Mapping[str, Any], level: str, colour: bool) -> str:
    """One line, and for failures the traceback below it, each line marked with a bar."""
    label = f"{level.upper():<5}"
    message = _printable(_message(event))
    if colour:
        if level in _LEVEL_COLOURS:
            label = f"{_LEVEL_COLOURS[level]}{label}{_RESET}"
        direction = event.get("turnstile_request")
        if direction is not None:
            tint = _CYAN if direction == "in" else _status_colour(event.get("status"))
            arrow, _, rest = message.partition(" ")
            if direction == "out":
                status, _, rest = rest.partition(" ")
                arrow = f"{arrow} {status}"
            message = f"{tint}{arrow}{_RESET} {rest}"
    shown = _names_in(_text(event.get("log_format") or ""))
    if "turnstile_request" in event:
        shown |= {"status", "duration"}
    pairs = [
        f" {escape(key)}={_quote(_pair_value(key, value))}"
        for key, value in _fields(event)
        if key not in shown
    ]
    line = f"{_timestamp(event.get('log_time'))} {label} {message}{''.join(pairs)}"
    if traceback := _traceback(event):
        line += "".join(
            f"\n    | {_printable(part)}" for part in traceback.rstrip("\n").split("\n")
        )
    return line


def _pair_value(name: str, value: Any) -> str:
    if _SECRET_FIELDS.match(name.lower()):
        return _MASK
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return json.dumps(_plain(value))
    return _scrub(_cut(_text(value)))


def _quote(text: str) -> str:
    text = escape(text)
    if text and not any(char in text for char in " \"'="):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# -- requests --------------------------------------------------------------------------------------

_requests = Logger(namespace="turnstile.request")


def log_request_in(
    method: bytes | str, target: bytes, client: str = "", engine: str = "", **fields: object
) -> None:
    """A request came in: the ``-->`` line. Does nothing unless info is on."""
    if not info_enabled:
        return
    if client:
        fields["client"] = client
    if engine:
        fields["engine"] = engine
    _requests.info(
        "--> {method} {target}",
        method=_text(method),
        target=redact_target(target),
        turnstile_request="in",
        **fields,
    )


def log_request_out(
    method: bytes | str,
    target: bytes,
    status: int,
    duration: float,
    client: str = "",
    engine: str = "",
    **fields: object,
) -> None:
    """A request is over: the ``<--`` line. ``status`` 0 means that it was never answered.

    Does nothing unless info is on.
    """
    if not info_enabled:
        return
    if client:
        fields["client"] = client
    if engine:
        fields["engine"] = engine
    _requests.info(
        "<-- {turnstile_status} {method} {target} {turnstile_took}",
        turnstile_status=status or "---",
        turnstile_took=f"{duration:.3f}s",
        method=_text(method),
        target=redact_target(target),
        status=status,
        duration=round(duration, 6),
        turnstile_request="out",
        **fields,
    )


def log_startup(log: Logger, config: Config, version: str) -> None:
    """The version, every setting with where it came from, and notices: at any level."""
    log.info("turnstile {version} starting", version=version, turnstile_always=True)
    if config.file:
        log.info("configuration file {file}", file=config.file, turnstile_always=True)
    for name, value, source in config.describe():
        log.info(
            "setting {name}={value} ({source})",
            name=name,
            value=value,
            source=source,
            turnstile_always=True,
        )
    for notice in config.notices:
        log.warn("{notice}", notice=notice, turnstile_always=True)


# -- where it goes ---------------------------------------------------------------------------------


class LogFile:
    """A file that lines are appended to; made anew when it is deleted or moved away.

    Each write is one system call on a descriptor in append mode, so several processes may share
    it. Raises `ConfigError` if it can't be opened; later errors lose lines, never the process.
    """

    check_every = 1.0

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._checked = time.monotonic()
        try:
            self._fd = self._open()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"log file {path}: can't be written: {reason}") from None

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        # A named pipe that nobody reads refuses to be opened, rather than holding up everything.
        fd = os.open(self.path, flags | os.O_NONBLOCK, 0o640)
        os.set_blocking(fd, True)
        return fd

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        now = time.monotonic()
        if now - self._checked >= self.check_every:
            self._checked = now
            if self._moved():
                self.reopen()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]

    def _moved(self) -> bool:
        try:
            here, there = os.fstat(self._fd), os.stat(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)

    def reopen(self) -> str | None:
        """Open the path again; if that fails the old file stays in use, and the reason is returned."""
        try:
            fd = self._open()
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        os.close(self._fd)
        self._fd = fd
        return None

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


class StreamSink:
    """Writes to an open text or binary stream; a broken one loses lines only."""

    def __init__(self, stream: IO[Any]) -> None:
        self._stream = getattr(stream, "buffer", stream)
        self._binary = self._stream is not stream or not hasattr(stream, "encoding")

    def write(self, data: bytes) -> None:
        """Write ``data`` and flush."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(data if self._binary else data.decode("utf-8"))
            self._stream.flush()

    def reopen(self) -> str | None:
        """A stream stays what it is."""
        return None

    def close(self) -> None:
        """The stream belongs to others."""


class SyslogSink:
    """Lines for the system's log, which adds time and priority itself."""

    def __init__(self, prefix: str) -> None:
        import syslog

        self._syslog = syslog
        syslog.openlog(prefix, syslog.LOG_PID, syslog.LOG_DAEMON)
        self._priorities = {
            "error": syslog.LOG_ERR,
            "warn": syslog.LOG_WARNING,
            "info": syslog.LOG_INFO,
            "debug": syslog.LOG_DEBUG,
        }

    def send(self, level: str, line: str) -> None:
        """Hand over one event."""
        for part in line.split("\n"):
            self._syslog.syslog(self._priorities[level], part.replace("\0", ""))

    def reopen(self) -> str | None:
        """The system's log rotates itself."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


Sink = LogFile | StreamSink | SyslogSink


@implementer(ILogObserver)
class Observer:
    """Writes events that pass the level in the configured format."""

    def __init__(self, sink: Sink, format: str, colour: bool) -> None:
        self.sink = sink
        self.colour = colour
        self._json = format == "json"
        self._busy = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write ``event``; never raises."""
        if self._busy:  # something logged while its event was being printed
            return
        self._busy = True
        try:
            level = _level_of(event)
            if _RANKS[level] < _rank and not event.get("turnstile_always"):
                return
            if self._json:
                line = render_json(event, level)
            else:
                line = render_text(event, level, self.colour)
            if isinstance(self.sink, SyslogSink):
                if not self._json:
                    line = line.partition(" ")[2]
                self.sink.send(level, line)
            else:
                self.sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))
        except Exception as error:
            with contextlib.suppress(Exception):
                if not isinstance(self.sink, SyslogSink):
                    note = f"an event was lost: {type(error).__name__}"
                    if self._json:
                        note = json.dumps({"level": "error", "msg": note})
                    self.sink.write(f"{note}\n".encode())
        finally:
            self._busy = False

    def set_level(self, name: str) -> None:
        """Change the level, of the whole process."""
        set_level(name)

    def write_to(self, sink: Sink, format: str, colour: bool) -> None:
        """Write elsewhere or otherwise from now on."""
        before, self.sink = self.sink, sink
        self._json = format == "json"
        self.colour = colour
        if before is not sink:
            before.close()

    def reopen(self) -> None:
        """Open the log file again, if it is one."""
        problem = self.sink.reopen()
        if problem:
            Logger(namespace="turnstile.log", observer=self).warn(
                "the log file can't be opened again, the old one stays in use: {problem}",
                problem=problem,
            )

    def close(self) -> None:
        """Let go of the log file."""
        self.sink.close()


_current: Observer | None = None


def wants_colour(isatty: bool, environ: Mapping[str, str]) -> bool:
    """Whether text may be coloured: NO_COLOR, FORCE_COLOR, then what the stream is."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return isatty and environ.get("TERM") != "dumb"


def make_observer(
    config: Config,
    stream: IO[Any] | Sink,
    isatty: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Observer:
    """The one log observer of the process; sets the level.

    LOG_FILE wins over ``stream``; raises `ConfigError` if it can't be written.
    """
    global _current
    sink: Sink
    if config.log_file is not None:
        sink, isatty = LogFile(config.log_file), False
    elif isinstance(stream, LogFile | StreamSink | SyslogSink):
        sink = stream
    else:
        sink = StreamSink(stream)
    set_level(config.log_level)
    _current = Observer(sink, config.log_format, _colours(sink, isatty, environ or {}))
    return _current


def _colours(sink: Sink, isatty: bool, environ: Mapping[str, str]) -> bool:
    return wants_colour(isatty, environ) and not isinstance(sink, LogFile | SyslogSink)


def prepare_switch(
    observer: Observer,
    config: Config,
    make_sink: Callable[[], tuple[Sink, bool]],
    environ: Mapping[str, str],
) -> Callable[[], None]:
    """Open what ``config`` wants the log written to; what is returned has ``observer`` write there.

    :param make_sink: the place without LOG_FILE, and whether it is a terminal.

    Raises `ConfigError` if it can't be written; nothing has changed then.
    """
    sink, isatty = observer.sink, observer.colour
    path = sink.path if isinstance(sink, LogFile) else None
    if config.log_file is None:
        sink, isatty = make_sink()
    elif path != os.path.abspath(config.log_file):
        sink, isatty = LogFile(config.log_file), False
    colour = _colours(sink, isatty, environ)
    return lambda: observer.write_to(sink, config.log_format, colour)


def reopen() -> None:
    """Open the log file of the process's observer again; nothing without one."""
    if _current is not None:
        _current.reopen()


def install_sighup(reactor: Any, callback: Callable[[], Any]) -> Callable[[], None]:
    """Call ``callback`` in the reactor on every SIGHUP; returns what undoes it.

    Where standard input was a terminal that is gone when the signal comes, the signal means what
    it meant first: the reactor is stopped. Does nothing on systems without the signal.
    """
    number = getattr(signal, "SIGHUP", None)
    if number is None:
        return lambda: None
    terminal = _stdin_is_terminal()

    def handle() -> None:
        if terminal and not _stdin_is_terminal():
            from turnstile.exitcode import _stop

            _stop(reactor)
        else:
            callback()

    def on_signal(signum: int, frame: object) -> None:
        reactor.callFromThread(handle)

    before = signal.signal(number, on_signal)

    def restore() -> None:
        if signal.getsignal(number) is on_signal:
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    return restore


def _stdin_is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


__all__ = [
    "LogFile",
    "LogLevel",
    "Logger",
    "Observer",
    "install_sighup",
    "log_request_in",
    "log_request_out",
    "log_startup",
    "make_observer",
    "redact_target",
    "reopen",
    "set_level",
    "wants_colour",
]
