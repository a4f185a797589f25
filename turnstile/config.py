"""Configuration: command-line option > environment variable > file > default.

`Config` is the one table of settings: each field says its names, its default, what it accepts and
what it means; options, help, the file and the start-up listing all come from it. Nothing here does
I/O but reading the configuration file (and, for ``ssl:`` listeners, the certificate they name).
URLs and listeners are in `turnstile.addresses`, the file's form in `turnstile.envfile`.

An empty value is a value: it sets a setting back to its default, which for an engine's URL means
that the engine is disabled.
"""

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from turnstile import sdargs
from turnstile.addresses import (
    ConfigError,
    Upstream,
    leads_back,
    parse_listen,
    same_place,
    split_endpoint,
)
from turnstile.durations import format_duration, parse_duration
from turnstile.envfile import format_env_file, parse_env_file
from turnstile.gpushare.errors import SegmentError
from turnstile.gpushare.shm import check_key
from turnstile.update.release import Repository

__all__ = [
    "DEFAULT_FILE",
    "FILE_VARIABLE",
    "RESERVED",
    "SETTINGS",
    "Config",
    "ConfigError",
    "Setting",
    "Upstream",
    "format_env_file",
    "load",
    "parse_env_file",
    "parse_listen",
    "split_endpoint",
]

DEFAULT_FILE = "/etc/turnstile/turnstile.env"
FILE_VARIABLE = "GPU_TURNSTILE_CONFIG"

#: Keys that have no effect: turnstile itself has no share, and starts no chat engine that could be given one. A file
#: that has them starts, with a notice.
RESERVED = frozenset("STADI_LLM_WEIGHT GPU_SHARE GPU_SHARE_WEIGHT GPU_SHARE_NAME WEIGHT".split())
#: Of those, names so common that their presence in the environment means nothing.
_COMMON_NAMES = frozenset({"WEIGHT"})
#: Read from the environment, wherever that is sensible at all.
_ENVIRONMENT_ONLY = frozenset({FILE_VARIABLE, "NO_COLOR", "FORCE_COLOR"})

#: The longest wait: what a reactor's timer can take, rounded down.
LONGEST = 24 * 24 * 3600.0
_LARGEST_FILE = 1 << 20

#: Where llama.cpp and sd-server have a port of their own.
DEFAULT_LISTEN_LLAMA = "tcp:8080"
DEFAULT_LISTEN_SD = "tcp:1234"
#: stadi's defaults: the one port for both, and where it expects llama.cpp.
STADI_LISTEN = "127.0.0.1:55558"
STADI_LLM = "http://127.0.0.1:55555"


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


def _parse_secret(text: str) -> str:
    if not text.isprintable() or not text.isascii() or " " in text:
        raise ValueError("it contains blanks, control characters or letters beyond ASCII")
    return text


def _parse_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(_parse_text(text)))
    except ValueError as error:
        raise ValueError(f"{text!r} can't be split into words: {error}") from None


def _number(smallest: float, largest: float) -> Kind:
    def parse(text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text):
            raise ValueError(f"{text!r} is not a number")
        if not smallest <= float(text) <= largest:
            raise ValueError(f"{text!r} is out of range ({smallest:g} to {largest:g})")
        return float(text)

    def write(value: float) -> str:
        return f"{value:.9f}".rstrip("0").rstrip(".")

    return Kind(parse, write, "NUMBER")


def _listen(bare_host: str = "") -> Kind:
    return Kind(lambda text: parse_listen(text, bare_host), str, "ADDRESS")


def _parse_gpu_key(text: str) -> str:
    if text.isdecimal() or text.lower() in ("auto", "none", "cpu"):
        raise ValueError(
            f"{text!r} is no key: those of this system's cards are what turnstile-peers shows"
        )
    try:
        check_key(text)
    except SegmentError as error:
        raise ValueError(str(error)) from None
    return text


_BOOLEAN = Kind(_parse_boolean, lambda value: "true" if value else "false", "true|false")
_TEXT = Kind(_parse_text)
_PATH = Kind(_parse_text, str, "FILE")
_SECRET = Kind(_parse_secret, str, "SECRET")
_WORDS = Kind(_parse_words, shlex.join, "ARGUMENTS")
_SHELL = Kind(_parse_text, str, "COMMAND")
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
    #: Never shown.
    secret: bool = False

    def parse(self, text: str) -> Any:
        """The value of ``text``; raises ValueError with a reason that has no name in it."""
        text = text.strip() or self.default
        return self.kind.parse(text) if text else None

    def format(self, value: Any) -> str:
        """The text that `parse` would turn into ``value``."""
        return "" if value is None else self.kind.format(value)

    def show(self, value: Any) -> str:
        """The same for everybody's eyes."""
        return "***" if self.secret and value is not None else self.format(value)


def _setting(
    env: str,
    kind: Kind,
    default: str,
    help: str,
    *,
    option: str = "",
    env_aliases: tuple[str, ...] = (),
    option_aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    row = {
        "env": env,
        "option": option or env.lower().replace("_", "-"),
        "default": default,
        "help": help,
        "kind": kind,
        "env_aliases": env_aliases,
        "option_aliases": option_aliases,
        "secret": secret,
    }
    value = kind.parse(default) if default else None
    return attrs.field(default=value, metadata={"setting": row}, repr=not secret)


@attrs.frozen(kw_only=True)
class Config:
    """Every setting, parsed. Durations are seconds; None is "not set"."""

    ollama_url: Upstream | None = _setting(
        "OLLAMA_URL", _URL, "", "URL of Ollama; empty: no Ollama.", option="ollama"
    )
    comfy_url: Upstream | None = _setting(
        "COMFY_URL", _URL, "", "URL of ComfyUI; empty: no ComfyUI.", option="comfy"
    )
    llama_url: Upstream | None = _setting(
        "LLAMA_URL",
        _URL,
        "",
        f"URL of llama.cpp's llama-server; empty: no llama.cpp, or with LISTEN_BROKER {STADI_LLM}.",
        option="llama",
        env_aliases=("STADI_LLM",),
        option_aliases=("llm",),
    )
    sd_args: tuple[str, ...] | None = _setting(
        "SD_ARGS",
        _WORDS,
        "",
        "The arguments that sd-server (stable-diffusion.cpp) is started with, quoted as in a"
        " shell; empty: no sd-server.",
        env_aliases=("STADI_SD_ARGS",),
    )
    sd_url: Upstream = _setting(
        "SD_URL",
        _URL,
        "http://127.0.0.1:55557",
        "Where sd-server listens once it is started.",
        option="sd",
        env_aliases=("STADI_SD",),
    )
    sd_bin: str = _setting(
        "SD_BIN",
        _PATH,
        "sd-server",
        "The sd-server program; without a slash it is looked up on PATH.",
        env_aliases=("STADI_SD_BIN",),
    )
    sd_log_dir: str | None = _setting(
        "SD_LOG_DIR",
        Kind(_parse_text, str, "DIRECTORY"),
        "",
        "Where sd-server's output is kept; empty: $LOGS_DIRECTORY (systemd), else"
        " $XDG_CACHE_HOME/stadi, else ~/.cache/stadi.",
        env_aliases=("STADI_SD_LOG_DIR",),
    )
    sd_weight: float | None = _setting(
        "SD_WEIGHT",
        _number(0.001, 1_000_000),
        "",
        "Run sd-server under turnstile-pace with this weight, so that it shares the card's time with its GPU-share"
        " peers; empty: it does not.",
        env_aliases=("STADI_SD_WEIGHT",),
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
    listen_llama: str | None = _setting(
        "LISTEN_LLAMA",
        _listen(),
        "",
        "Where llama.cpp's clients connect; empty: :8080, or nowhere if there is a LISTEN_BROKER.",
    )
    listen_sd: str | None = _setting(
        "LISTEN_SD",
        _listen(),
        "",
        "Where sd-server's clients connect; empty: :1234, or nowhere if there is a LISTEN_BROKER.",
    )
    listen_broker: str | None = _setting(
        "LISTEN_BROKER",
        _listen("127.0.0.1"),
        "",
        "One port for llama.cpp and sd-server; a bare port listens on 127.0.0.1 only; empty: none,"
        f" or {STADI_LISTEN} if SD_ARGS is set, and no other engine and no port for these two.",
        env_aliases=("STADI_LISTEN",),
        option_aliases=("listen",),
    )
    upstream_ca: str | None = _setting(
        "UPSTREAM_CA",
        _PATH,
        "",
        "PEM file of certificates to trust for https engines, instead of the system's.",
    )
    unload_timeout: float = _setting(
        "UNLOAD_TIMEOUT",
        _duration(),
        "60s",
        "How long to wait for Ollama or llama.cpp to unload its models.",
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
        "How long a chat request to Ollama waits for the card before it is answered 503.",
    )
    busy_wait: float = _setting(
        "BUSY_WAIT",
        _duration(),
        "2m",
        "The same for a chat request to llama.cpp.",
        env_aliases=("STADI_BUSY_WAIT",),
    )
    llm_stall_timeout: float = _setting(
        "LLM_STALL_TIMEOUT",
        _duration(),
        "15m",
        "How long a chat engine may be silent in the middle of a request while others wait for the card.",
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
    llama_api_key: str | None = _setting(
        "LLAMA_API_KEY",
        _SECRET,
        "",
        "The key that llama-server was given with --api-key, for turnstile's own calls to it.",
        secret=True,
    )
    llama_stop_command: str | None = _setting(
        "LLAMA_STOP_COMMAND",
        _SHELL,
        "",
        "Shell command that stops a llama-server which cannot unload its model; empty: none.",
        env_aliases=("LLAMA_EVICT_COMMAND",),
    )
    llama_start_command: str | None = _setting(
        "LLAMA_START_COMMAND",
        _SHELL,
        "",
        "Shell command that starts it again.",
    )
    sd_idle: float = _setting(
        "SD_IDLE",
        _duration(smallest=0),
        "5m",
        "How long after the end of its last generation sd-server is stopped; 0: only if another"
        " engine needs the card.",
        env_aliases=("STADI_IDLE",),
        option_aliases=("idle",),
    )
    load_wait: float = _setting(
        "LOAD_WAIT",
        _duration(),
        "15m",
        "How long sd-server may take until it listens, and llama.cpp to load a model that it was told to load.",
        env_aliases=("STADI_LOAD_WAIT",),
    )
    sd_stop_grace: float = _setting(
        "SD_STOP_GRACE",
        _duration(smallest=0),
        "10s",
        "How long sd-server has between SIGTERM and SIGKILL.",
    )
    vram_probe: str = _setting(
        "VRAM_PROBE",
        _choice("auto", "nvml", "amdgpu", "nvidia-smi", "comfyui", "command", "none"),
        "auto",
        "How the card's memory is looked at: the first of these that works, or the one named.",
    )
    vram_probe_command: str | None = _setting(
        "VRAM_PROBE_COMMAND",
        _SHELL,
        "",
        "Shell command that prints the card's used and total bytes; tried first if it is set.",
    )
    gpu: str | None = _setting(
        "GPU",
        _TEXT,
        "",
        "The card, where there are several: its index, UUID or PCI address; empty: the first.",
    )
    gpu_key: str | None = _setting(
        "GPU_KEY",
        Kind(_parse_gpu_key, str, "KEY"),
        "",
        "The card whose GPU-share peers are shown, by the key that they agree on; empty: all cards that have some.",
    )
    gpu_share_group: str | None = _setting(
        "GPU_SHARE_GROUP",
        _TEXT,
        "",
        "With SD_WEIGHT: the system group whose members share the card; empty: the processes of one user.",
    )
    vram_wait: float = _setting(
        "VRAM_WAIT",
        _duration(smallest=0),
        "45s",
        "How long to wait, after an engine has left the card, until the memory is seen to be free.",
        env_aliases=("STADI_VRAM_WAIT",),
    )
    free_gib: float = _setting(
        "FREE_GIB",
        _number(0, 100_000),
        "2",
        "The card counts as free at no more than so many GiB used, however little was seen before.",
        env_aliases=("STADI_FREE_GIB",),
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
        "How often a GET or HEAD that Ollama or ComfyUI answers 502, 503 or 504 is tried again.",
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
        """Name, value and source of every setting, for the listing at start; secrets are masked."""
        return [
            (setting.env, setting.show(getattr(self, setting.field)), source)
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
        broker = self.listen_broker
        if self.llama_url is not None and (self.listen_llama or not broker):
            found.append(("LISTEN_LLAMA", self.listen_llama or DEFAULT_LISTEN_LLAMA))
        if self.sd_args is not None and (self.listen_sd or not broker):
            found.append(("LISTEN_SD", self.listen_sd or DEFAULT_LISTEN_SD))
        if broker:
            found.append(("LISTEN_BROKER", broker))
        return found

    def upstreams(self) -> list[tuple[str, Upstream]]:
        """Name and URL of the enabled engines."""
        urls = [
            ("OLLAMA_URL", self.ollama_url),
            ("COMFY_URL", self.comfy_url),
            ("LLAMA_URL", self.llama_url),
            ("SD_URL", self.sd_url if self.sd_args is not None else None),
        ]
        return [(name, url) for name, url in urls if url is not None]


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(field=field.name, **field.metadata["setting"])
    for field in attrs.fields(Config)
    if "setting" in field.metadata
)
_BY_NAME = {name: setting for setting in SETTINGS for name in (setting.env, *setting.env_aliases)}


# -- the file --------------------------------------------------------------------------------------


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
            notices.append(f"{path}:{number}: {key} has no effect")
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
            notices.append(f"environment variable {key} has no effect")
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
    notices += _apply_stadi_defaults(values, sources)
    config = Config(
        **values,
        sources=sources,
        notices=tuple(notices),
        file=path if data is not None else None,
    )
    _check_together(config)
    if config.sd_weight is not None and config.sd_args is None:
        source = config.source_of("sd_weight")
        config = attrs.evolve(
            config, notices=(*config.notices, f"{source}: SD_WEIGHT has no effect without SD_ARGS")
        )
    if config.sd_args is not None:
        warnings = sdargs.warnings(config.sd_bin, config.sd_args, config.sd_url)
        config = attrs.evolve(config, notices=(*config.notices, *warnings))
    return config


def _apply_stadi_defaults(values: dict[str, Any], sources: dict[str, str]) -> list[str]:
    """What holds for starts in the manner of stadi; returns lines for the log.

    One that sets SD_ARGS and nothing that stadi does not have gets stadi's port; wherever there is that port,
    llama.cpp is where stadi expects it.
    """
    ours = ("ollama_url", "comfy_url", "listen_llama", "listen_sd", "listen_broker")
    notices = []
    if values.get("sd_args") and not any(values.get(name) for name in ours):
        values["listen_broker"] = parse_listen(STADI_LISTEN)
        sources["listen_broker"] = "stadi's default"
        notices.append(
            f"SD_ARGS without LISTEN_SD, LISTEN_LLAMA or LISTEN_BROKER: one port for llama.cpp and sd-server"
            f" ({STADI_LISTEN})"
        )
    if values.get("listen_broker") and not values.get("llama_url"):
        values["llama_url"] = Upstream.parse(STADI_LLM)
        sources["llama_url"] = "stadi's default"
    return notices


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
    if config.sd_args is None:
        if config.listen_broker is not None:
            raise ConfigError(
                "LISTEN_BROKER without SD_ARGS: turnstile starts sd-server itself and needs its"
                " command line"
            )
        if config.sd_url != attrs.fields(Config).sd_url.default or (
            "sd_url" in config.sources and not config.upstreams()
        ):
            raise ConfigError(
                "SD_URL without SD_ARGS: turnstile starts sd-server itself (only its exit frees the"
                " card) and needs its command line"
            )
    upstreams = config.upstreams()
    if not upstreams:
        raise ConfigError(
            "no engine: set OLLAMA_URL (--ollama), COMFY_URL (--comfy), LLAMA_URL (--llama) or"
            " SD_ARGS (--sd-args)"
        )
    _check_llama_and_sd(config)
    if config.backoff_max < config.backoff_initial:
        raise ConfigError(
            f"BACKOFF_MAX ({format_duration(config.backoff_max)}) is less than"
            f" BACKOFF_INITIAL ({format_duration(config.backoff_initial)})"
        )
    listeners = config.listeners()
    for index, (name, endpoint) in enumerate(listeners):
        for other, other_endpoint in listeners[:index]:
            if same_place(endpoint, other_endpoint):
                raise ConfigError(f"{other} and {name} are the same address ({endpoint})")
        for url_name, upstream in upstreams:
            if leads_back(upstream, endpoint):
                raise ConfigError(
                    f"{url_name} ({upstream.url}) is turnstile's own {name} ({endpoint}):"
                    " move the engine to another port, or turnstile"
                )


def _check_llama_and_sd(config: Config) -> None:
    if (config.llama_stop_command is None) != (config.llama_start_command is None):
        raise ConfigError("LLAMA_STOP_COMMAND and LLAMA_START_COMMAND go together")
    if config.vram_probe == "command" and config.vram_probe_command is None:
        raise ConfigError("VRAM_PROBE is command, but there is no VRAM_PROBE_COMMAND")
    if config.vram_probe == "comfyui" and config.comfy_url is None:
        raise ConfigError("VRAM_PROBE is comfyui, but there is no COMFY_URL")
    if config.sd_args is None:
        return
    if config.sd_weight is not None and not config.gpu_key and re.search("[.:]", config.gpu or ""):
        raise ConfigError(
            "SD_WEIGHT with a PCI address as GPU: name the card's key as well (GPU_KEY; turnstile-peers shows it)"
        )
    if config.sd_url.is_tls:
        raise ConfigError(f"SD_URL ({config.sd_url.url}): sd-server has no TLS, only http:// does")
    for name, upstream in config.upstreams():
        if name != "SD_URL" and (upstream.host, upstream.port) == (
            config.sd_url.host,
            config.sd_url.port,
        ):
            raise ConfigError(f"{name} and SD_URL are the same address ({config.sd_url.url})")
