"""Doing the steps of a plan, one by one."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import attrs

from turnstile.install.look import Manager
from turnstile.install.paths import SERVICE, InstallError, Paths
from turnstile.install.plan import (
    CopyDependency,
    CopyRelease,
    MakeFolder,
    MakeVenv,
    RemovePath,
    Step,
    SwitchRelease,
    Systemctl,
    WriteFile,
)
from turnstile.install.source import Files, Source, normal
from turnstile.update import boot


@attrs.frozen
class Doer:
    """Carries steps out.

    :ivar source: what is copied.
    :ivar say: told of each step before it is done.
    """

    paths: Paths
    source: Source | None
    manager: Manager
    say: Callable[[str], None]

    def do(self, steps: tuple[Step, ...]) -> None:
        """Do all of them; raises `InstallError` at the first that can't be done."""
        for step in steps:
            self.say(str(step))
            try:
                self._do(step)
            except OSError as error:
                name = f": {error.filename}" if error.filename else ""
                raise InstallError(f"{step}: {error.strerror or error}{name}") from None

    def _do(self, step: Step) -> None:
        match step:
            case MakeFolder(path):
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._own(path)
            case MakeVenv(path):
                _remove(path)
                # No pip: nothing is ever installed in it but by copying.
                venv.create(path, with_pip=False, symlinks=True)
                self._own(path)
            case CopyDependency(name, _):
                self._copy_dependency(name)
            case CopyRelease(version):
                self._copy_release(version)
            case SwitchRelease(_, version):
                self._switch(version)
            case WriteFile(path, text):
                _write(path, text)
                self._own(path)
            case RemovePath(path):
                _remove(path)
            case Systemctl(verb, units):
                self._systemctl(verb, units)

    def _systemctl(self, verb: str, units: tuple[str, ...]) -> None:
        try:
            self.manager.run(verb, units)
        except InstallError as error:
            if verb in ("start", "restart"):
                raise InstallError(f"{error} (journalctl -u {SERVICE} tells why)") from None
            raise

    def _copy_dependency(self, name: str) -> None:
        assert self.source is not None
        (bundle,) = (b for b in self.source.dependencies if b.name == name)
        target = self.paths.site_packages
        for old in _recorded(target, name):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                (target / old).unlink()
        for folder in target.glob("*.dist-info"):
            if _distribution_name(folder) == name:
                _remove(folder)
        _copy(bundle.files, target)
        for place in bundle.files:
            self._own(target / place.parts[0])

    def _copy_release(self, version: str) -> None:
        assert self.source is not None
        # Not in the service's folder, whose user could turn it into another one meanwhile.
        staged = Path(tempfile.mkdtemp(prefix=".turnstile-", dir=self.paths.staging))
        try:
            os.chmod(staged, 0o755)
            _copy(self.source.release, staged)
            owner = self.paths.root.stat()
            own_tree(staged, owner.st_uid, owner.st_gid)
            target = self.paths.releases / version
            _remove(target)
            os.rename(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _switch(self, version: str) -> None:
        state = boot.read_state(self.paths.root)
        before = boot.current_version(self.paths.root)
        # Whoever puts it there by hand wants it: it is not on trial.
        refused = [name for name in state["refused"] if name != version]
        state.update(version=None, attempts=0, previous=before, refused=refused)
        boot.switch(self.paths.root, version)
        boot.write_state(self.paths.root, state)
        for name in (boot.CURRENT, boot.STATE):
            self._own(self.paths.root / name)

    def _own(self, path: Path) -> None:
        """Give what is in the service's folder to whom that belongs: after the first start, the service's user."""
        root = self.paths.root
        if not path.is_relative_to(root) or not root.is_dir():
            return
        owner = root.stat()
        own_tree(path, owner.st_uid, owner.st_gid)


def own_tree(path: Path, user: int, group: int) -> None:
    """Give ``path`` and everything below it to ``user`` and ``group``; links are not followed."""

    def own(one: str | Path) -> None:
        found = os.lstat(one)
        if (found.st_uid, found.st_gid) != (user, group):
            os.chown(one, user, group, follow_symlinks=False)

    own(path)
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for folder, names, files in os.walk(path):
            for name in (*names, *files):
                own(os.path.join(folder, name))


def _copy(files: Files, folder: Path) -> None:
    for place, source in files.items():
        target = folder / place
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        shutil.copyfile(source, target)
        executable = source.stat().st_mode & 0o111
        os.chmod(target, 0o755 if executable else 0o644)


def _distribution_name(folder: Path) -> str:
    return normal(folder.name.removesuffix(".dist-info").rpartition("-")[0])


def _recorded(site_packages: Path, name: str) -> list[str]:
    """The files that an earlier copy of a distribution brought."""
    places = []
    for folder in site_packages.glob("*.dist-info"):
        if _distribution_name(folder) != name:
            continue
        with contextlib.suppress(OSError):
            for line in (folder / "RECORD").read_text(encoding="utf-8").splitlines():
                place = line.rpartition(",")[0].rpartition(",")[0].strip('"')
                if place and not place.startswith("/") and ".." not in place.split("/"):
                    places.append(place)
    return places


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write(path: Path, text: str) -> None:
    """Write whole or not at all, readable for everybody."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(fd, 0o644)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
