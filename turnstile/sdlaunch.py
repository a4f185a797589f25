"""How sd-server is started: its program, its arguments, and where its output goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Protocol

import attrs

from turnstile.addresses import ConfigError
from turnstile.child.guardian import Mode
from turnstile.child.logfile import RotatingLog
from turnstile.child.process import Child, Spawner
from turnstile.config import Config
from turnstile.gpushare import pace_command
from turnstile.sdargs import with_address

LOG_NAME = "sd-server.log"


class Spawns(Protocol):
    """What starts processes; see :class:`turnstile.child.process.Spawner`."""

    def spawn(
        self, program: tuple[str, ...], env: Mapping[str, str] | None, log: RotatingLog
    ) -> Child:
        """Start a program."""
        ...


@attrs.frozen
class Launch:
    """Starts sd-server whenever it is called."""

    program: tuple[str, ...]
    log_path: str
    _start: Callable[[], Child]

    def __call__(self) -> Child:
        """One more process; raises OSError."""
        return self._start()


def find_program(name: str, path: str | None) -> str:
    """The file of SD_BIN; a name without a slash is looked up in ``path``, as a shell does.

    :raises ConfigError: if there is none that may be run.
    """
    if "/" not in name:
        found = shutil.which(name, path=path)
        if found is None:
            raise ConfigError(
                f"SD_BIN: {name!r} is not on PATH (name its file: --sd-bin /…/{name})"
            )
        return os.path.abspath(found)
    if not os.path.exists(name):
        raise ConfigError(f"SD_BIN: {name!r} does not exist")
    if not os.path.isfile(name) or not os.access(name, os.X_OK):
        raise ConfigError(f"SD_BIN: {name!r} is no file that may be executed")
    return os.path.abspath(name)


def log_directory(configured: str | None, environ: Mapping[str, str]) -> str:
    """Where sd-server's output is kept: SD_LOG_DIR, systemd's LogsDirectory=, or the user's cache, as stadi has it.

    :raises ConfigError: if there is no such place.
    """
    if configured:
        return configured
    logs = environ.get("LOGS_DIRECTORY", "").partition(":")[0]
    if logs:
        return logs
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            raise ConfigError("SD_LOG_DIR is not set, and neither is HOME")
        cache = os.path.join(home, ".cache")
    return os.path.join(cache, "stadi")


def make_directory(path: str) -> None:
    """Make sure that there is a directory that may be written to.

    :raises ConfigError: if there is not.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"SD_LOG_DIR: {path}: can't be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"SD_LOG_DIR: {path}: can't be written to")


def pace_gpu(config: Config) -> str:
    """The card that sd-server shares: by GPU_KEY, else the GPU that was chosen, else the one that it would choose."""
    return config.gpu_key or config.gpu or "auto"


def make_launch(
    config: Config, reactor: object, environ: Mapping[str, str], spawner: Spawns | None = None
) -> Launch:
    """What starts sd-server as ``config`` says.

    :param spawner: starts it instead of the real one, and then nothing is checked.
    :raises ConfigError: if it can't be started that way.
    """
    assert config.sd_args is not None
    directory = os.path.abspath(log_directory(config.sd_log_dir, environ))
    name = config.sd_bin
    if spawner is None:
        name = find_program(name, environ.get("PATH"))
        make_directory(directory)
        spawner = Spawner(reactor)
    program = (name, *with_address(config.sd_bin, config.sd_args, config.sd_url))
    if config.sd_weight is not None:
        program = tuple(
            pace_command.command(
                program,
                weight=config.sd_weight,
                gpu=pace_gpu(config),
                group=config.gpu_share_group,
                on_death=Mode.KILL,
                # Its session, as of any child of ours, is ended with us.
                watched=True,
            )
        )
    path = os.path.join(directory, LOG_NAME)
    log = RotatingLog(path)
    starts = spawner

    def start() -> Child:
        return starts.spawn(program, None, log)

    return Launch(program, path, start)
