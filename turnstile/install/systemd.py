"""systemd's answers and doings, through systemctl."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from turnstile.install.paths import InstallError

#: Seconds that systemctl may take; a start lasts until the service is ready.
TIMEOUT = 300.0


class Systemd:
    """The system's own service manager."""

    @staticmethod
    def check() -> None:
        """Raises `InstallError` where systemd does not run the machine."""
        if not Path("/run/systemd/system").is_dir():
            raise InstallError("this machine is not run by systemd")

    def active(self, units: Iterable[str]) -> frozenset[str]:
        """Those of ``units`` that run, or are about to."""
        states = ("active", "activating", "reloading")
        return frozenset(unit for unit in units if self._ask("is-active", unit) in states)

    def enabled(self, units: Iterable[str]) -> frozenset[str]:
        """Those of ``units`` that are started with the machine."""
        return frozenset(unit for unit in units if self._ask("is-enabled", unit) == "enabled")

    def run(self, verb: str, units: tuple[str, ...] = ()) -> None:
        """Do something; raises `InstallError` with systemctl's reason."""
        done = self._call(verb, *units)
        if done.returncode:
            reason = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
            raise InstallError(f"systemctl {' '.join((verb, *units))}: {reason}")

    def _ask(self, verb: str, unit: str) -> str:
        return self._call(verb, unit).stdout.strip()

    @staticmethod
    def _call(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["systemctl", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except OSError:
            raise InstallError(
                "there is no systemctl: this machine is not run by systemd"
            ) from None
        except subprocess.TimeoutExpired:
            raise InstallError(f"systemctl {' '.join(arguments)} took too long") from None
