"""SIGHUP: the configuration is read anew, and what can change while turnstile runs does.

Everything is checked before anything changes: a file with a mistake leaves all settings as they are. Engines and
listeners are made once; a change of theirs is told of and waits for the next start.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from turnstile import log as tlog
from turnstile.config import SETTINGS, Config, ConfigError

_log = tlog.Logger()

#: The fields of `Config` that take effect at once.
LIVE = frozenset(
    # the log
    "log_level log_format log_file "
    # time-outs
    "unload_timeout job_timeout job_timeout_action llm_wait_timeout llm_stall_timeout free_timeout "
    "warm_timeout shutdown_timeout probe_timeout connect_timeout backoff_initial backoff_max "
    "unload_poll_interval history_poll_interval "
    "busy_wait load_wait sd_idle sd_stop_grace vram_wait "
    # limits, and what happens at them
    "llm_busy_mode llm_busy_status busy_retry_after llm_max_inflight image_burst "
    "retry_status_limit prompt_capture_limit free_between_jobs warm_model "
    # the updater
    "auto_update update_interval update_repo update_asset".split()
)
#: Those that need a new start.
FIXED = frozenset(
    # engines and listeners
    "ollama_url comfy_url llama_url llama_api_key llama_stop_command llama_start_command "
    "sd_args sd_url sd_bin sd_log_dir upstream_ca "
    "listen_ollama listen_comfy listen_ollama_nested listen_llama listen_sd listen_broker "
    # how the card's memory is looked at
    "vram_probe vram_probe_command gpu free_gib "
    # time division
    "gpu_key gpu_share_group sd_weight".split()
)


@attrs.frozen
class Change:
    """A setting that has another value than before, both as text."""

    field: str
    name: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before or 'empty'} -> {self.after or 'empty'} ({self.source})"


def compare(before: Config, after: Config) -> tuple[list[Change], list[Change]]:
    """What changed and takes effect at once, and what changed and needs a new start."""
    live: list[Change] = []
    later: list[Change] = []
    for setting in SETTINGS:
        field = setting.field
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            change = Change(
                field,
                setting.env,
                setting.format(old),
                setting.format(new),
                after.source_of(field),
            )
            (live if field in LIVE else later).append(change)
    return live, later


def merge(before: Config, after: Config) -> Config:
    """The settings that count from now on: the live ones of ``after``, the others of ``before``."""
    fields = {name: getattr(after, name) for name in LIVE}
    sources = {name: source for name, source in before.sources.items() if name not in LIVE}
    sources |= {name: source for name, source in after.sources.items() if name in LIVE}
    return attrs.evolve(before, **fields, sources=sources, notices=after.notices, file=after.file)


class Reloader:
    """Reads the configuration anew and has it applied.

    :param load: reads it; raises `ConfigError`.
    :param apply: puts the merged settings into effect; must not fail.
    :param open_log: opens what the log of these settings is written to; raises `ConfigError`. What it returns puts that
        into effect.
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        apply: Callable[[Config], None],
        open_log: Callable[[Config], Callable[[], None]],
    ) -> None:
        self.config = config
        self._load = load
        self._apply = apply
        self._open_log = open_log

    def reload(self) -> bool:
        """Read and apply; returns whether the configuration could be used."""
        before = self.config
        try:
            after = self._load()
            live, later = compare(before, after)
            switch_log: Callable[[], None] = _nothing
            if any(change.field in ("log_file", "log_format") for change in live):
                switch_log = self._open_log(after)
        except ConfigError as error:
            _log.error(
                "the configuration can't be used, the settings stay as they are: {error}",
                error=str(error),
            )
            return False
        self.config = merge(before, after)
        switch_log()
        tlog.set_level(self.config.log_level)
        self._apply(self.config)
        self._report(live, later, [x for x in after.notices if x not in before.notices])
        return True

    @staticmethod
    def _report(live: list[Change], later: list[Change], notices: list[str]) -> None:
        for change in live:
            _log.info("setting {change}", change=str(change), turnstile_always=True)
        for change in later:
            _log.warn(
                "setting {change}: takes effect at the next start",
                change=str(change),
                turnstile_always=True,
            )
        for notice in notices:
            _log.warn("{notice}", notice=notice, turnstile_always=True)
        if not live and not later:
            _log.info("the configuration was read again: no change", turnstile_always=True)


def _nothing() -> None:
    """The log stays where it is."""


__all__ = ["FIXED", "LIVE", "Change", "Reloader", "compare", "merge"]
