"""The folder of an installation that ``turnstile-service`` made, as the updater sees it.

What is in it, and the state of an update, is described in :mod:`turnstile.update.boot`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from turnstile.update import boot
from turnstile.update.release import NotUsable

VENV = "venv"


@attrs.frozen
class Layout:
    """An installation.

    :ivar root: its folder.
    """

    root: Path

    @classmethod
    def find(cls, package: Path, prefix: Path) -> Layout | None:
        """The installation that a running program is part of; ``None`` if it is of another kind.

        :param package: the folder of the package ``turnstile`` that runs.
        :param prefix: of the Python that runs it.
        """
        if len(package.parents) < 3:
            return None
        releases = package.parents[1]
        root = releases.parent
        if releases.name != boot.RELEASES or not (root / boot.CURRENT).is_symlink():
            return None
        with contextlib.suppress(OSError):
            if prefix.samefile(root / VENV):
                return cls(root)
        return None

    @property
    def releases(self) -> Path:
        """Where the versions are."""
        return self.root / boot.RELEASES

    @property
    def python(self) -> Path:
        """The Python that runs them."""
        return self.root / VENV / "bin" / "python"

    @property
    def current(self) -> str | None:
        """The version that the next start runs."""
        return boot.current_version(self.root)

    @property
    def on_trial(self) -> str | None:
        """The version that was put in place and has not come up yet."""
        found: str | None = boot.read_state(self.root)["version"]
        return found

    @property
    def previous(self) -> str | None:
        """The version before that one."""
        found: str | None = boot.read_state(self.root)["previous"]
        return found

    @property
    def refused(self) -> frozenset[str]:
        """Versions that did not come up."""
        return frozenset(boot.read_state(self.root)["refused"])

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other updates out; raises `NotUsable` if there is one."""
        fd = os.open(self.releases, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise NotUsable("another update is under way") from None
        try:
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def staging(self, place: Path | None = None) -> Iterator[Path]:
        """A new folder beside the versions, or in ``place``, which is gone afterwards unless it was moved."""
        folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=place or self.releases))
        os.chmod(folder, 0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put_in_place(self, staged: Path, version: str) -> None:
        """Move a staged version to its place and let the next start run it, on trial."""
        target = self.releases / version
        if target.exists():
            # Not the running one: that would be no newer version.
            shutil.rmtree(target)
        os.rename(staged, target)  # a folder's owner stays what it is
        boot.sync_folder(self.releases)
        state = boot.read_state(self.root)
        before = boot.current_version(self.root)
        refused = [name for name in state["refused"] if name != version]
        state.update(version=version, previous=before, attempts=0, refused=refused)
        # Noted first: what is in place without a note would not be on trial.
        boot.write_state(self.root, state)
        boot.switch(self.root, version)

    def confirm(self, version: str, warn: Callable[[str], None]) -> bool:
        """``version`` came up: it stays; returns whether it was on trial. Older ones but the last are removed."""
        state = boot.read_state(self.root)
        if state["version"] != version:
            return False
        state.update(version=None, attempts=0)
        boot.write_state(self.root, state)
        keep = {version, state["previous"], boot.current_version(self.root)}
        for folder in self.releases.iterdir():
            if folder.name not in keep:
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    warn(f"{folder} could not be removed: {error.strerror or error}")
        return True


__all__ = ["VENV", "Layout"]
