"""Configuration: command-line option > environment variable > file > default.

`Config` is the one table of settings: each field says its names, its default, what it accepts and
what it means; options, help, the file and the start-up listing all come from it. Nothing here does
I/O but reading the configuration file (and, for ``ssl:`` listeners, the certificate they name).

An empty value is a value: it sets a setting back to its default, which for an engine's URL means
that the engine is disabled.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from turnstile.durations import format_duration, parse_duration
from turnstile.update.release import Repository

DEFAULT_FILE = "/etc/turnstile/turnstile.env"
FILE_VARIABLE = "GPU_TURNSTILE_CONFIG"

#: Keys of features that are not built yet. A file that has them starts, with a notice.
RESERVED = frozenset(
    # llama.cpp, stable-diffusion.cpp and the port that fronts both
    "LLAMA_URL LISTEN_LLAMA LLAMA_EVICT_COMMAND LLAMA_STOP_COMMAND LLAMA_START_COMMAND "
    "SD_URL SD_BIN SD_ARGS SD_LOG_DIR SD_IDLE SD_WEIGHT LISTEN_SD LISTEN_BROKER "
    "IDLE BUSY_WAIT LOAD_WAIT VRAM_WAIT VRAM_PROBE VRAM_PROBE_COMMAND FREE_GIB GPU "
    "STADI_LISTEN STADI_LLM STADI_SD STADI_IDLE STADI_BUSY_WAIT STADI_VRAM_WAIT STADI_LOAD_WAIT "
    "STADI_FREE_GIB STADI_SD_BIN STADI_SD_ARGS STADI_SD_LOG_DIR STADI_LLM_WEIGHT STADI_SD_WEIGHT "
    # GPU-share
    "GPU_KEY GPU_SHARE GPU_SHARE_WEIGHT GPU_SHARE_NAME GPU_SHARE_GROUP WEIGHT".split()
)
#: Of those, names so common that their presence in the environment means nothing.
_COMMON_NAMES = frozenset({"GPU", "IDLE", "WEIGHT"})
#: Read from the environment, wherever that is sensible at all.
_ENVIRONMENT_ONLY = frozenset({FILE_VARIABLE, "NO_COLOR", "FORCE_COLOR"})

#: The longest wait: what a reactor's timer can take, rounded down.
LONGEST = 24 * 24 * 3600.0
_LARGEST_FILE = 1 << 20


class ConfigError(ValueError):
    """The configuration can't be used; its text is one line that says why and where."""


# -- engine URLs -----------------------------------------------------------------------------------

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@attrs.frozen
class Upstream:
    """Where an engine is: the parts of its URL.

    ``host`` is an address (IPv6 without brackets) or an ASCII host name; ``base_path`` is empty
    or starts with a slash, never ends with one, and is kept as it was written.
    """

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Upstream":
        """Take an ``http`` or ``https`` URL apart; raises `ConfigError` with the reason."""
        if any(ord(char) <= 0x20 or ord(char) == 0x7F for char in text):
            raise ConfigError("a URL can't contain blanks or control characters")
        if "://" not in text:
            shown = _mask(text)
            raise ConfigError(f"{shown!r} is not a URL (is it http://{shown.lstrip('/')} ?)")
        shown = _mask(text)
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ConfigError(f"{shown!r} is not a URL: its host can't be understood") from None
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS:
            raise ConfigError(f"{shown!r}: only http:// and https:// URLs are understood")
        if "@" in parts.netloc:
            raise ConfigError(
                f"{shown!r}: a user name or password in the URL isn't supported"
                " (engines take none, and URLs end up in logs)"
            )
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(
                f"{shown!r} is not a URL: its port is not a number up to 65535"
            ) from None
        if parts.query or parts.fragment or text.endswith(("?", "#")):
            raise ConfigError(f"{shown!r}: an engine's URL has no query and no fragment")
        if port == 0:
            raise ConfigError(f"{shown!r}: port 0 can't be connected to")
        path = parts.path.rstrip("/")
        if not path.isascii() or "\\" in path:
            raise ConfigError(f"{shown!r}: percent-encode the path")
        host = _check_host(parts.netloc, parts.hostname or "", shown)
        return cls(scheme, host, port or _DEFAULT_PORTS[scheme], path)

    @property
    def is_tls(self) -> bool:
        """Whether connections to it are encrypted."""
        return self.scheme == "https"

    @property
    def netloc(self) -> str:
        """What clients put into the Host header: the default port is left out."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL again, in its canonical form."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.base_path}"

    def __str__(self) -> str:
        return self.url


def _check_host(netloc: str, host: str, text: str) -> str:
    if netloc.startswith("["):
        address, _, zone = host.partition("%")
        try:
            parsed = ipaddress.IPv6Address(address)
        except ValueError:
            raise ConfigError(f"{text!r}: {address!r} is not an IPv6 address") from None
        zone = zone.removeprefix("25")
        return f"{parsed}%{zone}" if zone else str(parsed)
    if not host.isascii():
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError as error:
            raise ConfigError(f"{text!r}: not a host name: {error}") from None
    if not host:
        raise ConfigError(f"{text!r}: the host is missing")
    if not _HOST_NAME.fullmatch(host) or ".." in host or len(host) > 253:
        raise ConfigError(f"{text!r}: {host!r} is not a host name")
    return host


def _mask(url: str) -> str:
    """``url`` without what may be a password or a token; made for what is no proper URL, too."""
    # A password may contain what ends a host: everything up to the last @ goes.
    scheme, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    _, at, after = rest.rpartition("@")
    url = f"{scheme}{slashes}{'***' if at else ''}{at}{after}"
    return re.sub(r"(?s)(?<=[?#]).+", "***", url)


# -- listeners -------------------------------------------------------------------------------------

_ENDPOINT_TYPES = frozenset({"tcp", "tcp6", "ssl", "unix", "systemd", "haproxy", "tls", "stdio"})
_HOST_PORT = re.compile(r"(?P<host>[^\s:\[\]=\\]*|\[[^\[\]\s]+\]):(?P<port>[0-9]+)")


def parse_listen(text: str, bare_host: str = "") -> str:
    """Return the Twisted endpoint string that ``text`` stands for, checked but not opened.

    Besides endpoint strings these are understood: ``11434`` and ``:11434`` (all IPv4 interfaces,
    or ``bare_host`` if that is given), ``host:11434``, ``[::1]:11434``.
    """
    if not text.isprintable() or text[-1:] == "\\":
        raise ConfigError(f"{text!r} is not a listening address")
    kind = text.partition(":")[0]
    if kind not in _ENDPOINT_TYPES or kind == text:
        match = _HOST_PORT.fullmatch(f":{text}" if text.isdecimal() and text.isascii() else text)
        if match:
            host = match["host"] or bare_host
            port = _check_port(match["port"], text)
            if host.startswith("["):
                host = host[1:-1]
                try:
                    ipaddress.IPv6Address(host.partition("%")[0])
                except ValueError:
                    raise ConfigError(f"{text!r}: {host!r} is not an IPv6 address") from None
            elif host == "*":
                host = ""
            elif host and not _HOST_NAME.fullmatch(host):
                raise ConfigError(f"{text!r}: {host!r} is not a host name")
            interface = host.replace(":", "\\:")
            return f"tcp:{port}:interface={interface}" if host else f"tcp:{port}"
        if kind == text or (text.count(":") > 1 and "=" not in text):
            raise ConfigError(
                f"{text!r} is not a listening address (like :11434, 127.0.0.1:11434,"
                " [::1]:11434, or a Twisted endpoint such as unix:/run/turnstile.sock)"
            )
    _check_endpoint(text)
    return text


def _check_port(text: str, whole: str) -> int:
    if len(text) > 5 or int(text) > 65535:
        raise ConfigError(f"{whole!r}: a port is a number up to 65535")
    return int(text)


def _check_endpoint(text: str) -> None:
    """Let Twisted take ``text`` apart, with no reactor at hand and nothing opened."""
    from twisted.internet import endpoints

    try:
        kind, positional, named = split_endpoint(text)
        if kind == "systemd":
            # Twisted would look for the descriptor at once, and 22.4 knows no names.
            names = set(named) - {"domain"}
            if positional or names not in ({"index"}, {"name"}):
                raise ValueError("it takes domain= and one of index= and name=")
            if named.get("domain") not in ("INET", "INET6", "UNIX"):
                raise ValueError("domain= is INET, INET6 or UNIX")
            if not named.get("index", "0").isdecimal():
                raise ValueError("index= is a number")
            return
        if kind == "stdio":
            raise ValueError("standard input can't be listened on")
        if kind in ("tcp", "tcp6", "ssl"):
            port = positional[0] if positional else named.get("port", "")
            if not port.isdecimal() or not port.isascii():
                raise ValueError("the port is missing or not a number")
            _check_port(port, text)
        if kind == "unix" and not (positional[0] if positional else named.get("address")):
            raise ValueError("the path is missing")
        parse: Callable[[object, str], object] = endpoints.serverFromString
        parse(_NoReactor(), text)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{text!r} is not a usable Twisted endpoint: {reason}") from None


class _NoReactor:
    """Stands in for a reactor while an endpoint string is only taken apart."""


def split_endpoint(text: str) -> tuple[str, list[str], dict[str, str]]:
    """Type, positional and named arguments of an endpoint string; backslash escapes."""
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in re.findall(r"(?:^|:)((?:\\.|[^:\\])*)", text):
        pieces = re.fullmatch(r"((?:\\.|[^=\\])*)(?:(=)(.*))?", part, re.DOTALL)
        if pieces is None:
            raise ValueError("a stray backslash")
        name, equals, value = (re.sub(r"\\(.)", r"\1", piece or "") for piece in pieces.groups())
        if equals:
            named[name] = value
        else:
            positional.append(name)
    if not positional:
        raise ValueError("the type is missing")
    return positional[0], positional[1:], named


_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


def _is_loopback(host: str) -> bool:
    """Whether connecting to ``host`` stays on this machine by its name or address alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _tcp_place(endpoint: str) -> tuple[str, int] | None:
    """Interface and port of a TCP listener; None for other kinds and for port 0 (any)."""
    kind, positional, named = split_endpoint(endpoint)
    if kind not in ("tcp", "tcp6", "ssl"):
        return None
    port = int(positional[0] if positional else named["port"])
    interface = named.get("interface", "")
    return (interface, port) if port else None


def _same_place(one: str, other: str) -> bool:
    """Whether two listeners can't both be opened."""
    first, second = _tcp_place(one), _tcp_place(other)
    if first and second:
        same_host = first[0] == second[0] or not _WILDCARDS.isdisjoint((first[0], second[0]))
        return first[1] == second[1] and same_host
    if first or second:
        return False
    split_one, split_other = split_endpoint(one), split_endpoint(other)
    if split_one[0] == split_other[0] == "unix":
        paths = [
            os.path.normpath(positional[0] if positional else named["address"])
            for _, positional, named in (split_one, split_other)
        ]
        return paths[0] == paths[1]
    return one == other and split_one[0] == "systemd"


def _leads_back(upstream: Upstream, endpoint: str) -> bool:
    """Whether an engine's URL points at turnstile's own listener on this machine."""
    place = _tcp_place(endpoint)
    if place is None or place[1] != upstream.port:
        return False
    host = upstream.host.lower().rstrip(".")
    if place[0] in _WILDCARDS:
        return _is_loopback(host) or host in _WILDCARDS
    return host == place[0] or {host, place[0]} <= {"localhost", "127.0.0.1"}


# -- what a setting accepts ------------------------------------------------------------------------


@attrs.frozen
class Kind:
    """How a setting's text becomes its value and back. An empty text is None."""

    parse: Callable[[str], Any]
    format: Callable[[Any], str] = str
    metavar: str = "TEXT"


def _duration(smallest: float = 0.001, largest: float = LONGEST) -> Kind:
    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if not smallest <= seconds <= largest:
            raise ValueError(
                f"{text!r} is out of range ({format_duration(smallest)} to"
                f" {format_duration(largest)})"
            )
        return seconds

    return Kind(parse, format_duration, "DURATION")


def _integer(smallest: int, largest: int) -> Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(f"{text!r} is not a whole number")
        if not smallest <= int(text) <= largest:
            raise ValueError(f"{text!r} is out of range ({smallest} to {largest})")
        return int(text)

    return Kind(parse, str, "NUMBER")


def _choice(*values: str, **spellings: str) -> Kind:
    def parse(text: str) -> str:
        chosen = text.lower()
        chosen = spellings.get(chosen, chosen)
        if chosen not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}")
        return chosen

    return Kind(parse, str, "|".join(values))


def _parse_boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on", "t", "y"):
        return True
    if text.lower() in ("false", "0", "no", "off", "f", "n"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} contains control characters")
    return text


def _listen(bare_host: str = "") -> Kind:
    return Kind(lambda text: parse_listen(text, bare_host), str, "ADDRESS")


_BOOLEAN = Kind(_parse_boolean, lambda value: "true" if value else "false", "true|false")
_TEXT = Kind(_parse_text)
_PATH = Kind(_parse_text, str, "FILE")
_URL = Kind(Upstream.parse, str, "URL")
_REPOSITORY = Kind(Repository.parse, str, "URL")


@attrs.frozen
class Setting:
    """One row of the table: a field of `Config`, its names, its default and its meaning."""

    field: str
    env: str
    option: str
    default: str
    help: str
    kind: Kind
    env_aliases: tuple[str, ...] = ()
    option_aliases: tuple[str, ...] = ()

    def parse(self, text: str) -> Any:
        """The value of ``text``; raises ValueError with a reason that has no name in it."""
        text = text.strip() or self.default
        return self.kind.parse(text) if text else None

    def format(self, value: Any) -> str:
        """The text that `parse` would turn into ``value``."""
        return "" if value is None else self.kind.format(value)


def _setting(
    env: str,
    kind: Kind,
    default: str,
    help: str,
    *,
    option: str = "",
    env_aliases: tuple[str, ...] = (),
    option_aliases: tuple[str, ...] = (),
) -> Any:
    row = {
        "env": env,
        "option": option or env.lower().replace("_", "-"),
        "default": default,
        "help": help,
        "kind": kind,
        "env_aliases": env_aliases,
        "option_aliases": option_aliases,
    }
    value = kind.parse(default) if default else None
    return attrs.field(default=value, metadata={"setting": row})


@attrs.frozen(kw_only=True)
class Config:
    """Every setting, parsed. Durations are seconds; None is "not set"."""

    ollama_url: Upstream | None = _setting(
        "OLLAMA_URL", _URL, "", "URL of Ollama; empty: no Ollama.", option="ollama"
    )
    comfy_url: Upstream | None = _setting(
        "COMFY_URL", _URL, "", "URL of ComfyUI; empty: no ComfyUI.", option="comfy"
    )
    listen_ollama: str = _setting(
        "LISTEN_OLLAMA",
        _listen(),
        ":11434",
        "Where Ollama's clients connect: :PORT (all IPv4 interfaces), HOST:PORT, [IPV6]:PORT,"
        " or a Twisted endpoint (tcp:, unix:, ssl:, systemd:).",
    )
    listen_comfy: str = _setting(
        "LISTEN_COMFY", _listen(), ":8188", "Where ComfyUI's clients connect; as above."
    )
    listen_ollama_nested: str | None = _setting(
        "LISTEN_OLLAMA_NESTED",
        _listen("127.0.0.1"),
        "",
        "Where nodes of ComfyUI workflows reach Ollama from inside a job; a bare port listens on"
        " 127.0.0.1 only; empty: off.",
    )
    upstream_ca: str | None = _setting(
        "UPSTREAM_CA",
        _PATH,
        "",
        "PEM file of certificates to trust for https engines, instead of the system's.",
    )
    unload_timeout: float = _setting(
        "UNLOAD_TIMEOUT", _duration(), "60s", "How long to wait for Ollama to unload its models."
    )
    job_timeout: float = _setting(
        "JOB_TIMEOUT",
        _duration(),
        "15m",
        "How long an image job may go on without a sign of progress.",
    )
    job_timeout_action: str = _setting(
        "JOB_TIMEOUT_ACTION",
        _choice("release", "interrupt"),
        "release",
        "What happens at JOB_TIMEOUT: release the card, or interrupt the job as well.",
    )
    llm_wait_timeout: float = _setting(
        "LLM_WAIT_TIMEOUT",
        _duration(),
        "10m",
        "How long a chat request waits for the card before it is answered 503.",
    )
    llm_stall_timeout: float = _setting(
        "LLM_STALL_TIMEOUT",
        _duration(),
        "15m",
        "How long Ollama may be silent in the middle of a chat request while others wait for the card.",
    )
    llm_busy_mode: str = _setting(
        "LLM_BUSY_MODE",
        _choice("wait", "reject"),
        "wait",
        "What a chat request does while the card is busy: wait, or be rejected at once.",
    )
    llm_busy_status: int = _setting(
        "LLM_BUSY_STATUS", _integer(400, 599), "503", "Status of rejected chat requests."
    )
    busy_retry_after: int = _setting(
        "BUSY_RETRY_AFTER",
        _integer(0, 86400),
        "30",
        "Seconds sent as Retry-After when the card is busy.",
    )
    llm_max_inflight: int = _setting(
        "LLM_MAX_INFLIGHT",
        _integer(0, 1_000_000),
        "0",
        "The most chat requests on the card at once; 0: no limit.",
    )
    image_burst: int = _setting(
        "IMAGE_BURST",
        _integer(0, 1_000_000),
        "0",
        "After so many image jobs in a row waiting chats get a turn; 0: images always first.",
    )
    free_between_jobs: bool = _setting(
        "FREE_BETWEEN_JOBS",
        _BOOLEAN,
        "false",
        "Free ComfyUI's memory after every job, even if another one follows.",
    )
    warm_model: str | None = _setting(
        "WARM_MODEL", _TEXT, "", "Ollama model to load again after an image job; empty: none."
    )
    log_level: str = _setting(
        "LOGLEVEL",
        _choice("error", "warn", "info", "debug", warning="warn"),
        "warn",
        "What is logged: info adds every request, debug every change of the lock.",
        env_aliases=("LOG_LEVEL",),
        option_aliases=("log-level",),
    )
    log_format: str = _setting(
        "LOG_FORMAT", _choice("text", "json"), "text", "Lines for people, or JSON objects."
    )
    log_file: str | None = _setting(
        "LOG_FILE",
        _PATH,
        "",
        "File to append the log to, opened again on SIGHUP; empty: standard error.",
    )
    unload_poll_interval: float = _setting(
        "UNLOAD_POLL_INTERVAL",
        _duration(),
        "500ms",
        "The longest pause between two looks at Ollama while it unloads.",
    )
    history_poll_interval: float = _setting(
        "HISTORY_POLL_INTERVAL",
        _duration(),
        "1s",
        "Pause between two looks at a running ComfyUI job where no event comes.",
    )
    probe_timeout: float = _setting(
        "PROBE_TIMEOUT", _duration(), "5s", "How long the look at each engine at start may take."
    )
    free_timeout: float = _setting(
        "FREE_TIMEOUT",
        _duration(),
        "30s",
        "How long ComfyUI may take to free its memory after a job.",
    )
    warm_timeout: float = _setting(
        "WARM_TIMEOUT", _duration(), "2m", "How long loading WARM_MODEL may take."
    )
    shutdown_timeout: float = _setting(
        "SHUTDOWN_TIMEOUT",
        _duration(smallest=0),
        "10s",
        "How long answers under way may go on at shutdown; 0: cut them at once.",
    )
    backoff_initial: float = _setting(
        "BACKOFF_INITIAL",
        _duration(),
        "1s",
        "First pause before an unreachable engine is tried again; doubles each time.",
    )
    backoff_max: float = _setting("BACKOFF_MAX", _duration(), "60s", "The longest such pause.")
    retry_status_limit: int = _setting(
        "RETRY_STATUS_LIMIT",
        _integer(0, 100),
        "3",
        "How often a GET or HEAD that an engine answers 502, 503 or 504 is tried again.",
    )
    connect_timeout: float = _setting(
        "CONNECT_TIMEOUT", _duration(), "10s", "How long connecting to an engine may take."
    )
    prompt_capture_limit: int = _setting(
        "PROMPT_CAPTURE_LIMIT",
        _integer(1, 1 << 30),
        "65536",
        "Bytes of ComfyUI's answer to a prompt that are searched for the job's id.",
    )
    auto_update: bool | None = _setting(
        "AUTO_UPDATE",
        _BOOLEAN,
        "",
        "Install new signed versions; only where turnstile-service installed this one."
        " Empty: if this build has its publisher's key.",
    )
    update_interval: float = _setting(
        "UPDATE_INTERVAL",
        _duration(smallest=60),
        "6h",
        "How often to look for a new version; the first time is at the start.",
    )
    update_repo: Repository | None = _setting(
        "UPDATE_REPO",
        _REPOSITORY,
        "",
        "Repository whose releases are looked at, https://HOST/OWNER/NAME (Gitea, Forgejo, GitHub).",
    )
    update_asset: str = _setting(
        "UPDATE_ASSET",
        _TEXT,
        "turnstile-*-py3-none-any.whl",
        "Pattern of the name of a release's wheel; beside it are NAME.sig and NAME.sha256.",
    )

    #: Where values that are not defaults came from, by field name.
    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False)
    #: Lines to log once at start: what was read but has no effect.
    notices: tuple[str, ...] = attrs.field(default=(), eq=False)
    #: The file that was read, if any.
    file: str | None = attrs.field(default=None, eq=False)

    def source_of(self, field: str) -> str:
        """Where the value of ``field`` came from; ``default`` if nobody set it."""
        return self.sources.get(field, "default")

    def describe(self) -> list[tuple[str, str, str]]:
        """Name, value and source of every setting, for the listing at start."""
        return [
            (setting.env, setting.format(getattr(self, setting.field)), source)
            for setting in SETTINGS
            for source in (self.source_of(setting.field),)
        ]

    def listeners(self) -> list[tuple[str, str]]:
        """Name and endpoint string of the listeners that the enabled engines have."""
        found = []
        if self.ollama_url is not None:
            found.append(("LISTEN_OLLAMA", self.listen_ollama))
            if self.listen_ollama_nested is not None:
                found.append(("LISTEN_OLLAMA_NESTED", self.listen_ollama_nested))
        if self.comfy_url is not None:
            found.append(("LISTEN_COMFY", self.listen_comfy))
        return found


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(field=field.name, **field.metadata["setting"])
    for field in attrs.fields(Config)
    if "setting" in field.metadata
)
_BY_NAME = {name: setting for setting in SETTINGS for name in (setting.env, *setting.env_aliases)}


# -- the file --------------------------------------------------------------------------------------

_LINE = re.compile(r"(?:export[ \t]+)?(?P<key>[^=]*?)[ \t]*=[ \t]*(?P<value>.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(.*)', re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^']*)'(.*)", re.DOTALL)
_COMMENT = re.compile(r"[ \t]+#.*\Z|\A#.*\Z", re.DOTALL)


def parse_env_file(data: bytes, name: str) -> list[tuple[int, str, str]]:
    """Line number, key and value of each setting in an env file; ``name`` is for messages.

    ``KEY=VALUE`` lines, with or without ``export``; blank lines; comments from a ``#`` at the start
    of a line or after a blank. Values may be quoted: ``'as it is'``, or ``"with \\\\ \\" \\$"``.
    """
    found = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            key, value = _parse_line(raw.removesuffix(b"\r")) or ("", "")
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: {error}") from None
        if key:
            found.append((number, key, value))
    return found


def _parse_line(raw: bytes) -> tuple[str, str] | None:
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    if any((ord(char) < 0x20 and char != "\t") or ord(char) == 0x7F for char in line):
        raise ValueError("a control character")
    line = line.strip(" \t")
    if not line or line.startswith("#"):
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError("not a KEY=VALUE line")
    key, rest = match["key"], match["value"]
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} can't be the name of a setting")
    quoted = None
    if rest.startswith('"'):
        quoted = _DOUBLE_QUOTED.fullmatch(rest)
    elif rest.startswith("'"):
        quoted = _SINGLE_QUOTED.fullmatch(rest)
    else:
        return key, _COMMENT.sub("", rest).rstrip(" \t")
    if quoted is None:
        raise ValueError(f"the value of {key} has no closing quote")
    if _COMMENT.sub("", quoted[2]).strip(" \t"):
        raise ValueError(f"text after the closing quote of {key}")
    value = quoted[1]
    return key, re.sub(r'\\([\\"$`])', r"\1", value) if rest.startswith('"') else value


def format_env_file(values: Mapping[str, str]) -> str:
    """Write an env file that `parse_env_file` reads back the same, as systemd and a shell do."""
    lines = []
    for key, value in values.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} can't be the name of a setting")
        if any((ord(char) < 0x20 and char != "\t") or ord(char) == 0x7F for char in value):
            raise ValueError(f"the value of {key} contains control characters")
        if not re.fullmatch(r"[A-Za-z0-9_./:@%+,=\[\]-]*", value):
            escaped = re.sub(r'([\\"$`])', r"\\\1", value)
            value = f'"{escaped}"'
        lines.append(f"{key}={value}\n")
    return "".join(lines)


def _read_file(path: str, required: bool) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        if not required:
            return None
        raise ConfigError(f"configuration file {path}: it does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"configuration file {path}: can't be read: {reason}") from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"configuration file {path}: more than 1 MiB, that can't be it")
    return data


def _check_file(data: bytes, path: str) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """Line and text by field, and notices about keys without effect."""
    values: dict[str, tuple[int, str]] = {}
    notices = []
    lines: dict[str, int] = {}
    for number, key, text in parse_env_file(data, path):
        setting = _BY_NAME.get(key)
        name = setting.env if setting else key
        if name in lines:
            raise ConfigError(f"{path}:{number}: {key} was set already in line {lines[name]}")
        lines[name] = number
        if setting is not None:
            values[setting.field] = (number, text)
        elif key in RESERVED:
            notices.append(f"{path}:{number}: {key} has no effect yet")
        elif key in _ENVIRONMENT_ONLY:
            notices.append(
                f"{path}:{number}: {key} has no effect here, only as an environment variable"
            )
        else:
            known = [*_BY_NAME, *sorted(RESERVED)]
            near = difflib.get_close_matches(key.upper(), known, n=1, cutoff=0.0)
            raise ConfigError(f"{path}:{number}: unknown setting {key} (nearest: {near[0]})")
    return values, notices


# -- all together ----------------------------------------------------------------------------------


def load(
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    default_file: str = DEFAULT_FILE,
) -> Config:
    """Put the configuration together; raises `ConfigError`.

    ``options`` holds what the command line gave, by option name without dashes (``ollama``,
    ``llm-wait-timeout``, ``config``); None means not given.
    """
    path = options.get("config") or environ.get(FILE_VARIABLE) or default_file
    required = bool(options.get("config") or environ.get(FILE_VARIABLE))
    data = _read_file(path, required)
    from_file, notices = _check_file(data, path) if data is not None else ({}, [])
    for key in sorted(RESERVED - _COMMON_NAMES):
        if environ.get(key):
            notices.append(f"environment variable {key} has no effect yet")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in SETTINGS:
        text, source = _choose(setting, options, environ, from_file, path)
        if text is None:
            continue
        try:
            values[setting.field] = setting.parse(text)
        except ValueError as error:
            label = f"{source}: {setting.env}" if source.startswith(f"{path}:") else source
            raise ConfigError(f"{label}: {error}") from None
        sources[setting.field] = source
    config = Config(
        **values,
        sources=sources,
        notices=tuple(notices),
        file=path if data is not None else None,
    )
    _check_together(config)
    return config


def _choose(
    setting: Setting,
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    from_file: Mapping[str, tuple[int, str]],
    path: str,
) -> tuple[str | None, str]:
    """The text that counts for ``setting``, and where it was found."""
    for option in (setting.option, *setting.option_aliases):
        text = options.get(option)
        if text is not None:
            return text, f"--{option}"
    names = [name for name in (setting.env, *setting.env_aliases) if name in environ]
    for name in sorted(names, key=lambda name: not environ[name]):  # those with a value first
        return environ[name], f"environment variable {name}"
    if setting.field in from_file:
        number, text = from_file[setting.field]
        return text, f"{path}:{number}"
    return None, "default"


def _check_together(config: Config) -> None:
    """What no setting shows alone."""
    upstreams = (("OLLAMA_URL", config.ollama_url), ("COMFY_URL", config.comfy_url))
    if all(upstream is None for _, upstream in upstreams):
        raise ConfigError("no engine: set OLLAMA_URL (--ollama) or COMFY_URL (--comfy)")
    if config.backoff_max < config.backoff_initial:
        raise ConfigError(
            f"BACKOFF_MAX ({format_duration(config.backoff_max)}) is less than"
            f" BACKOFF_INITIAL ({format_duration(config.backoff_initial)})"
        )
    listeners = config.listeners()
    for index, (name, endpoint) in enumerate(listeners):
        for other, other_endpoint in listeners[:index]:
            if _same_place(endpoint, other_endpoint):
                raise ConfigError(f"{other} and {name} are the same address ({endpoint})")
        for url_name, upstream in upstreams:
            if upstream is not None and _leads_back(upstream, endpoint):
                raise ConfigError(
                    f"{url_name} ({upstream.url}) is turnstile's own {name} ({endpoint}):"
                    " move the engine to another port, or turnstile"
                )
