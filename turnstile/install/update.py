"""``turnstile-service update``: the updater's look for a new version, now and by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, inlineCallbacks

from turnstile.config import SETTINGS, ConfigError, parse_env_file
from turnstile.install.do import own_tree
from turnstile.install.look import Manager, check_links
from turnstile.install.paths import SERVICE, InstallError, Paths
from turnstile.update import pubkey
from turnstile.update.download import Downloader, DownloadError
from turnstile.update.fetch import Fetches, Source, find_update, install_update
from turnstile.update.layout import Layout
from turnstile.update.release import NothingNew, NotUsable, Repository
from turnstile.update.signature import load_keys


@attrs.frozen
class Settings:
    """The settings of the updater, from a configuration that need not be complete."""

    auto_update: bool | None
    update_repo: Repository | None
    update_asset: str


def read_settings(paths: Paths) -> Settings:
    """Those of the service's file; raises `InstallError`."""
    try:
        data = paths.config.read_bytes()
    except FileNotFoundError:
        data = b""
    found: dict[str, Any] = {}
    try:
        lines = {key: text for _, key, text in parse_env_file(data, str(paths.config))}
        for setting in SETTINGS:
            if setting.field in attrs.fields_dict(Settings):
                found[setting.field] = setting.parse(lines.get(setting.env, ""))
    except ConfigError as error:
        raise InstallError(str(error)) from None
    except ValueError as error:
        raise InstallError(f"{paths.config}: {setting.env}: {error}") from None
    return Settings(**found)


def update(
    paths: Paths,
    manager: Manager,
    say: Callable[[str], None],
    *,
    force: bool,
    dry_run: bool,
    fetcher: Fetches | None = None,
) -> int:
    """Look, install, and restart a service that runs; returns the exit status, raises `InstallError`."""
    check_links(paths)
    layout = Layout(paths.root)
    running = layout.current
    if running is None:
        raise InstallError(
            "no turnstile is installed that could be updated (turnstile-service install)"
        )
    settings = read_settings(paths)
    if settings.update_repo is None:
        raise InstallError(f"UPDATE_REPO is not set in {paths.config}")
    if settings.auto_update is False and not force:
        raise InstallError(f"AUTO_UPDATE is off in {paths.config} (--force updates nevertheless)")
    try:
        keys = load_keys(pubkey.PUBLIC_KEYS)
    except ValueError as error:
        raise InstallError(str(error)) from None
    source = Source(repository=settings.update_repo, asset=settings.update_asset, keys=keys)
    refused = frozenset() if force else layout.refused

    owner = paths.root.stat()

    @inlineCallbacks
    def work(reactor: Any) -> Generator[Deferred[Any], Any, str | None]:
        found = yield find_update(fetcher or Downloader(reactor), source, running, refused)
        version: str
        version, data = found
        if not dry_run:
            # The service's user may write to its folder, but is not to be trusted with what root does: nothing that
            # lies there is run, and nothing is written there but whole.
            yield install_update(
                reactor,
                layout,
                version,
                data,
                python=Path(sys.executable),
                place=paths.staging,
                finish=lambda staged: own_tree(staged, owner.st_uid, owner.st_gid),
            )
        return version

    try:
        version = _in_reactor(work)
    except NothingNew as nothing:
        say(f"nothing to do: {nothing.version} is the latest release")
        return 0
    except (NotUsable, DownloadError) as error:
        raise InstallError(str(error)) from None
    if dry_run:
        say(f"would install turnstile {version}, in place of {running}")
        return 0
    say(f"turnstile {version} is in place of {running}")
    if SERVICE in manager.active((SERVICE,)):
        manager.run("restart", (SERVICE,))
        say("the service was restarted")
    else:
        say("it is used when the service is started")
    return 0


def _in_reactor(work: Callable[[Any], Deferred[Any]]) -> Any:
    """What ``work`` comes to, in a reactor that runs for it alone."""
    from twisted.internet import reactor as _reactor

    reactor: Any = _reactor
    results: list[Any] = []

    def begin() -> None:
        d = work(reactor)
        d.addBoth(results.append)
        d.addBoth(lambda _: reactor.stop())

    reactor.callWhenRunning(begin)
    reactor.run()
    if not results:  # a signal ended it
        raise InstallError("interrupted")
    (result,) = results
    if hasattr(result, "raiseException"):
        result.raiseException()
    return result


__all__ = ["Settings", "read_settings", "update"]
