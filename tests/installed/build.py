"""Builds the package in the image made for it."""

import os
import subprocess
from pathlib import Path

from images import ROOT
from machine import Failed, layered

Result = subprocess.CompletedProcess[str]


def sources() -> bytes:
    """The files of the checkout as a tar archive: what git has, or would take."""
    listed = subprocess.run(
        [
            "git",
            "-c",
            "safe.directory=*",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode:
        names = [b"."]
        options = [
            "--exclude=./.*",
            "--exclude=./build",
            "--exclude=./dist",
            "--exclude=__pycache__",
        ]
    else:
        # Deleted files that are not committed yet are listed too.
        names = [
            name
            for name in listed.stdout.split(b"\0")
            if name and os.path.lexists(ROOT / os.fsdecode(name))
        ]
        options = []
    return subprocess.run(
        ["tar", "--create", "--null", *options, "--files-from=-"],
        cwd=ROOT,
        input=b"\0".join(names),
        check=True,
        capture_output=True,
    ).stdout


def version() -> str:
    """What git says."""
    return subprocess.run(
        ["sh", "script/version"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


class Workshop:
    """A place to build in; ``with`` opens it."""

    def __init__(self, image: Path, place: Path) -> None:
        self._layer = layered(image, place)

    def __enter__(self) -> "Workshop":
        self._root = self._layer.__enter__()
        for name in ("proc", "dev"):
            subprocess.run(["mount", "--rbind", f"/{name}", self._root / name], check=True)
        self._sources = sources()
        return self

    def __exit__(self, *_: object) -> None:
        self._layer.__exit__(None, None, None)

    def run(self, script: str, **environ: str) -> Result:
        """Run a shell's ``script``; raises `Failed` with the end of its output."""
        done = subprocess.run(
            ["chroot", self._root, "sh", "-euc", script],
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "LC_ALL": "C.UTF-8",
                "HOME": "/root",
                **environ,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise Failed("\n".join(done.stdout.splitlines()[-25:]))
        return done

    def unpack(self, name: str) -> Path:
        """The sources, in a folder of their own."""
        folder = self._root / "srv" / name
        folder.mkdir()
        subprocess.run(["tar", "--extract", "--directory", folder], input=self._sources, check=True)
        return folder

    def build(self, name: str, version: str) -> bytes:
        """The package of the sources in the folder ``name``."""
        # What debian/control wants is in the image; a compiler, which dpkg-buildpackage wants as well, has no use here.
        self.run(
            f"cd /srv/{name} && sh script/build-deb /srv/{name}.out",
            VERSION=version,
            BUILD_OPTIONS="--no-check-builddeps",
        )
        (deb,) = (self._root / "srv" / f"{name}.out").glob("*.deb")
        return deb.read_bytes()

    def take(self, path: str) -> bytes:
        """A file from inside."""
        return (self._root / path.lstrip("/")).read_bytes()
