"""Where a service that ``turnstile-service`` makes has its files."""

from __future__ import annotations

from pathlib import Path

import attrs

SERVICE = "turnstile.service"
#: Folders that the service can't see: its sandbox has ProtectHome= and PrivateTmp=.
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")


class InstallError(Exception):
    """It can't be done; the text is one line that says why, and what to do."""


@attrs.frozen
class Paths:
    """Every path below ``base``, which is ``/`` but for tests.

    :ivar python: the version of Python that the installation is for, as ``3.11``.
    """

    python: str
    base: Path = Path("/")

    @property
    def root(self) -> Path:
        """The service's own folder; systemd makes it a link into /var/lib/private at the first start."""
        return self.base / "var/lib/turnstile"

    @property
    def venv(self) -> Path:
        """The Python environment of what turnstile needs."""
        return self.root / "venv"

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.venv / "bin/python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        return self.venv / f"lib/python{self.python}/site-packages"

    @property
    def path_file(self) -> Path:
        """What lets it find the version of turnstile that is in place."""
        return self.site_packages / "turnstile.pth"

    @property
    def releases(self) -> Path:
        """The versions of turnstile."""
        return self.root / "releases"

    @property
    def staging(self) -> Path:
        """Where what is to be put into the service's folder is prepared: beside it, where only root may write."""
        return self.root.resolve().parent

    @property
    def boot(self) -> Path:
        """What runs before each start; see :mod:`turnstile.update.boot`."""
        return self.root / "boot.py"

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.base / "etc/turnstile/turnstile.env"

    @property
    def units(self) -> Path:
        """Where units of the machine's administrator are."""
        return self.base / "etc/systemd/system"

    @property
    def packaged_units(self) -> tuple[Path, ...]:
        """Where a distribution's package has its unit."""
        return tuple(
            self.base / folder / "systemd/system" / SERVICE for folder in ("usr/lib", "lib")
        )

    def inside(self, path: Path) -> str:
        """``path`` as the service and systemd see it."""
        return "/" + str(path.relative_to(self.base))


def is_hidden(path: Path) -> bool:
    """Whether the service could not see ``path``."""
    return any(path.is_relative_to(folder) for folder in HIDDEN)
