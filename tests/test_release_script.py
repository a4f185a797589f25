"""``script/release``: what it makes is what the updater takes, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from release_kit import KEY, public_pem

import turnstile
from turnstile.update import wheel
from turnstile.update.signature import check_checksum, check_signature, load_keys

ROOT = Path(turnstile.__file__).parent.parent

pytestmark = [
    pytest.mark.skipif(
        not (ROOT / "script" / "release").exists(), reason="not a checkout of the repository"
    ),
    pytest.mark.skipif(
        not all(map(shutil.which, ("git", "openssl"))), reason="needs git and openssl"
    ),
]


def run(*command: Any, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    who = {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@localhost"}
    who |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in who.items()}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={
            **os.environ,
            **who,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "PYTHON": sys.executable,
            **environ,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )


def git(folder: Path, *arguments: str) -> str:
    done = run("git", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that a wheel is made from, and a key in it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.cache")
    for name in ("turnstile", "twisted", "script"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore, symlinks=True)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    key = f"PUBLIC_KEYS = ({public_pem()!r},)\n"
    (folder / "turnstile/update/pubkey.py").write_text(key)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return folder


@pytest.fixture
def private(tmp_path: Path) -> Path:
    from cryptography.hazmat.primitives import serialization

    path = tmp_path / "private.pem"
    path.write_bytes(
        KEY.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("how", ["file", "environment"])
def test_a_release_is_taken_by_the_updater(
    checkout: Path, private: Path, tmp_path: Path, how: str
) -> None:
    pytest.importorskip("build")
    git(checkout, "tag", "v1.2.3")
    (checkout / "turnstile" / "not_committed.py").touch()
    out = tmp_path / "out"
    if how == "file":
        done = run("script/release", private, out, cwd=checkout)
    else:
        done = run(
            "script/release", "-", out, cwd=checkout, RELEASE_SIGNING_KEY=private.read_text()
        )
    assert done.returncode == 0, done.stderr
    name = "turnstile-1.2.3-py3-none-any.whl"
    names = [name, f"{name}.sig", f"{name}.sha256"]
    assert done.stdout.splitlines() == [str(out / name) for name in names]
    data, signature, checksum = ((out / name).read_bytes() for name in names)
    check_signature(data, signature, load_keys([public_pem()]))
    check_checksum(data, checksum)
    wheel.check_metadata(wheel.read_metadata(data), "1.2.3", "3.11.2", wheel.installed_version)
    wheel.unpack(data, tmp_path / "unpacked")
    assert (tmp_path / "unpacked/turnstile/systemd/turnstile.service").exists()
    assert not (tmp_path / "unpacked/turnstile/not_committed.py").exists()


def refused(checkout: Path, *arguments: Any, **environ: str) -> str:
    done = run("script/release", *arguments, cwd=checkout, **environ)
    assert done.returncode == 1 and done.stdout == ""
    assert list(checkout.glob("dist/*")) == []
    return done.stderr


def test_what_is_refused(checkout: Path, private: Path, tmp_path: Path) -> None:
    assert "usage: script/release" in refused(checkout)
    assert "no such key" in refused(checkout, "/dev/null/x")
    assert "RELEASE_SIGNING_KEY is not set" in refused(checkout, "-", RELEASE_SIGNING_KEY="")
    assert "HEAD is not a tag" in refused(checkout, private)
    git(checkout, "tag", "v1.2.3-rc1")
    assert "the tag v1.2.3-rc1 is not vX.Y.Z" in refused(checkout, private)
    git(checkout, "tag", "-d", "v1.2.3-rc1")
    git(checkout, "tag", "v1.2.3")
    (tmp_path / "bad.pem").write_text("nonsense")
    assert "the key can't be read" in refused(checkout, tmp_path / "bad.pem")
    rsa = tmp_path / "rsa.pem"
    run("openssl", "genpkey", "-algorithm", "rsa", "-out", rsa, cwd=tmp_path)
    assert "is not of the kind Ed25519" in refused(checkout, rsa)
    other = tmp_path / "other.pem"
    run("openssl", "genpkey", "-algorithm", "ed25519", "-out", other, cwd=tmp_path)
    assert "the key is not in turnstile/update/pubkey.py" in refused(checkout, other)
    (checkout / "README.md").write_text("changed")
    assert "changes that are not committed" in refused(checkout, private)
