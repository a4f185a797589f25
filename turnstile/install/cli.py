"""The command ``turnstile-service``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import turnstile
from turnstile.config import ConfigError
from turnstile.install.do import Doer
from turnstile.install.look import (
    ALL_UNITS,
    Manager,
    check_links,
    check_machine,
    look,
    make_wanted,
    read_config,
)
from turnstile.install.paths import SERVICE, InstallError, Paths
from turnstile.install.plan import MakeVenv, Seen, Step, Wanted, plan_install, plan_remove
from turnstile.install.source import check_visible, find_source
from turnstile.install.systemd import Systemd
from turnstile.install.update import update
from turnstile.log import escape
from turnstile.update.layout import Layout

#: What ``status`` exits with, as systemctl does.
NOT_RUNNING = 3
NOT_INSTALLED = 4

_ALIASES = {
    "--install-service": ["install"],
    "--remove-service": ["remove"],
    "--force-update": ["update", "--force"],
}
_ELSEWHERE = {
    "win32": "on Windows, run turnstile in WSL 2 (with systemd, where turnstile-service works) or in a container",
    "darwin": "on macOS, have launchd run the command turnstile (ProgramArguments, KeepAlive)",
}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="turnstile-service",
        description="Make turnstile a systemd service of this machine, from the environment that this"
        " command runs in. Files: /var/lib/turnstile, /etc/turnstile/turnstile.env, and units in"
        " /etc/systemd/system.",
        epilog="--install-service, --remove-service and --force-update do the same as install,"
        " remove and update --force.",
    )
    parser.add_argument("--version", action="version", version=f"turnstile {turnstile.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install", help="install the service, or bring it up to date; changes only what differs"
    )
    install.add_argument(
        "--config", metavar="FILE", help="configuration for a machine that has none yet"
    )
    install.add_argument(
        "--no-copy",
        action="store_true",
        help="run turnstile where it is now, instead of a copy in /var/lib/turnstile",
    )
    remove = commands.add_parser(
        "remove", help="stop and remove the service; the configuration stays"
    )
    for command in (install, remove):
        command.add_argument("--dry-run", action="store_true", help="only say what would be done")
    commands.add_parser("status", help="say what is installed, and whether it runs")
    updating = commands.add_parser("update", help="look for a new version now, and install it")
    updating.add_argument(
        "--force",
        action="store_true",
        help="even if AUTO_UPDATE is off, or the version did not come up before",
    )
    updating.add_argument("--dry-run", action="store_true", help="only say what there is")
    return parser


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; the process ends with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["service"]:
        given = given[1:]
    for index, word in enumerate(given):
        if word in _ALIASES:
            given[index : index + 1] = _ALIASES[word]
            # Options of the command may stand before its old name.
            given = given[index:] + given[:index]
            break
    options = make_parser().parse_args(given)
    try:
        status = run(options, Paths(f"{sys.version_info.major}.{sys.version_info.minor}"))
    except InstallError as error:
        print(f"turnstile-service: {escape(str(error))}", file=sys.stderr)
        status = 1
    raise SystemExit(status)


def run(
    options: argparse.Namespace,
    paths: Paths,
    manager: Manager | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Do what was asked; returns the exit status, raises `InstallError`."""
    if not sys.platform.startswith("linux"):
        hint = _ELSEWHERE.get(sys.platform, "elsewhere, run the command turnstile")
        raise InstallError(f"it makes a systemd service, which only Linux has; {hint}")
    if manager is None:
        Systemd.check()
        manager = Systemd()
    needs_root = options.command in ("install", "remove", "update") and not options.dry_run
    if needs_root and os.geteuid() != 0 and paths.base == Path("/"):
        raise InstallError(f"this needs root: sudo {_this_command()} {options.command}")
    os.umask(0o022)
    try:
        match options.command:
            case "install":
                return _install(options, paths, manager, say)
            case "remove":
                return _remove(options, paths, manager, say)
            case "update":
                return update(paths, manager, say, force=options.force, dry_run=options.dry_run)
            case _:
                return _status(paths, manager, say)
    except PermissionError as error:
        raise InstallError(f"{error.filename}: {error.strerror}: this needs root") from None


def _this_command() -> str:
    # sudo has another PATH, which has no virtual environments in it.
    found = Path(sys.argv[0])
    return str(found.resolve()) if found.name == "turnstile-service" else "turnstile-service"


# -- install ---------------------------------------------------------------------------------------------------------


def _install(
    options: argparse.Namespace, paths: Paths, manager: Manager, say: Callable[[str], None]
) -> int:
    check_machine(paths)
    check_links(paths)
    source = find_source()
    copied = not options.no_copy
    if copied:
        check_visible(source.home, "the Python that this environment stands on")
    else:
        check_visible(source.interpreter, "the Python to run")
        check_visible(Path(turnstile.__file__), "turnstile")
    config = _given_config(options.config)
    wanted = make_wanted(paths, source, config, copied=copied)
    seen = look(paths, source if copied else None, wanted, manager)
    problem = _config_problem(paths, config)
    if problem and SERVICE in seen.active:
        raise InstallError(f"the service runs, but could not be started again: {problem}")
    steps = plan_install(wanted, seen)
    if any(isinstance(s, MakeVenv) for s in steps) and source.interpreter.is_relative_to(
        paths.root
    ):
        raise InstallError(
            f"{paths.venv} has to be made anew, which it can't do itself: run this from another environment"
        )
    if options.dry_run:
        _print_plan(steps, say)
    else:
        Doer(paths, source, manager, say).do(steps)
        if not steps:
            say("nothing to do: everything is as it should be")
    if problem:
        say(f"not started: {problem}")
        say(f"edit {paths.config}, then run this again (or: systemctl enable --now turnstile)")
    elif SERVICE not in seen.active and SERVICE in seen.enabled:
        say("the service did not run before, and was not started: systemctl start turnstile")
    return 0


def _given_config(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InstallError(f"configuration file {name}: can't be read: {reason}") from None
    return text


def _config_problem(paths: Paths, config: str | None) -> str:
    try:
        read_config(paths, config)
    except ConfigError as error:
        return str(error)
    return ""


def _print_plan(steps: tuple[Step, ...], say: Callable[[str], None]) -> None:
    if not steps:
        say("nothing would be done: everything is as it should be")
    for step in steps:
        say(f"would {step}")


# -- remove ----------------------------------------------------------------------------------------------------------


def _remove(
    options: argparse.Namespace, paths: Paths, manager: Manager, say: Callable[[str], None]
) -> int:
    units = tuple(paths.units / name for name in ALL_UNITS if (paths.units / name).exists())
    # What a service's own user owns, systemd keeps there, and a link in the place where it was.
    folders = tuple(
        path
        for path in (paths.root, paths.root.parent / "private" / paths.root.name)
        if path.exists() or path.is_symlink()
    )
    if not units:
        check_machine(paths)
    seen = Seen(active=manager.active(ALL_UNITS), enabled=manager.enabled(ALL_UNITS))
    steps = plan_remove(folders, units, seen if units else Seen())
    if options.dry_run:
        _print_plan(steps, say)
        return 0
    Doer(paths, None, manager, say).do(steps)
    if not steps:
        say("nothing to do: the service is not installed")
    elif paths.config.exists():
        say(f"{paths.config.parent} stays, with the configuration")
    return 0


# -- status ----------------------------------------------------------------------------------------------------------


def _status(paths: Paths, manager: Manager, say: Callable[[str], None]) -> int:
    unit = paths.units / SERVICE
    if not unit.exists():
        check_machine(paths)
        say("turnstile is not installed as a service (turnstile-service install)")
        return NOT_INSTALLED
    active, enabled = manager.active(ALL_UNITS), manager.enabled(ALL_UNITS)
    if paths.root.is_symlink() or paths.root.is_dir():
        os.listdir(paths.root)  # only root may
    layout = Layout(paths.root)
    if "boot.py" in unit.read_text(encoding="utf-8"):
        say(f"version: {layout.current or 'none in place'} in {paths.root}")
        if layout.on_trial is not None:
            say(f"on trial: {layout.on_trial}, before it was {layout.previous}")
        for version in sorted(layout.refused):
            say(f"did not come up: {version}")
    else:
        say("version: the one of the environment that the unit names")
    for name in ALL_UNITS:
        if name != SERVICE and not (name in active or name in enabled):
            continue
        say(
            f"{name}: {'running' if name in active else 'not running'},"
            f" {'enabled' if name in enabled else 'not enabled'}"
        )
    problem = _config_problem(paths, None)
    say(f"configuration: {problem or paths.config}")
    return 0 if SERVICE in active else NOT_RUNNING


__all__ = ["Wanted", "main", "make_parser", "run"]
