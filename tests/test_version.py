"""The version that scripts and the Debian package get from git is the one that the wheel gets."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.skipif(not (ROOT / "script" / "version").exists(), reason="not a checkout"),
    pytest.mark.skipif(not shutil.which("git"), reason="needs git"),
]


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script").mkdir(parents=True)
        for name in ("script/version", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)

    def git(self, *arguments: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        return subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
            cwd=self.folder,
            env={**kept, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(self, name: str) -> None:
        (self.folder / name).write_text(name)
        self.git("add", ".")
        self.git("commit", "-q", "-m", name)

    def version(self) -> str:
        done = subprocess.run(
            ["sh", "script/version"], cwd=self.folder, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


def test_without_git(checkout):
    assert checkout.version() == "0.1.dev0"


def test_within_the_repository_of_somebody_else(checkout):
    outer = Checkout(checkout.folder.parent / "outer")
    outer.git("init", "-q")
    outer.commit("a")
    outer.git("tag", "v9.9.9")
    inner = outer.folder / "inner"
    shutil.copytree(checkout.folder, inner)
    checkout.folder = inner
    assert checkout.version() == "0.1.dev0"


def test_from_no_tag_to_the_release_after_the_next(checkout):
    checkout.git("init", "-q")
    checkout.commit("a")
    checkout.commit("b")
    node = checkout.git("rev-parse", "--short", "HEAD")
    assert checkout.version() == f"0.1.dev2+g{node}"
    # Other tags are nobody's version.
    checkout.git("tag", "before-the-release")
    assert checkout.version() == f"0.1.dev2+g{node}"
    checkout.git("tag", "v1.2.9")
    assert checkout.version() == "1.2.9"
    checkout.commit("c")
    node = checkout.git("rev-parse", "--short", "HEAD")
    assert checkout.version() == f"1.2.10.dev1+g{node}"
    (checkout.folder / "c").write_text("changed")
    assert re.fullmatch(rf"1\.2\.10\.dev1\+g{node}\.d\d{{8}}", checkout.version())
    checkout.git("commit", "-q", "-a", "-m", "d")
    checkout.git("tag", "-a", "-m", "annotated", "v1.3.0")
    assert checkout.version() == "1.3.0"
    # A release that was changed is none.
    (checkout.folder / "a").write_text("changed")
    assert re.fullmatch(r"1\.3\.1\.dev0\+g[0-9a-f]+\.d\d{8}", checkout.version())


@pytest.mark.parametrize(
    "version,expected",
    [
        ("1.2.3", "1.2.3"),
        ("1.2.4.dev3+g0123abc", "1.2.4~dev3+g0123abc"),
        ("0.1.dev2+g0123abc.d20260102", "0.1~dev2+g0123abc.d20260102"),
        ("0.1.dev0", "0.1~dev0"),
    ],
)
def test_as_debian_writes_it(version, expected):
    """dpkg sorts what begins with a tilde before the release; the way back is in debian/rules."""
    (command,) = re.findall(r'(?m)^debian_version=\$\(echo "\$version" \| (sed .*)\)$', BUILD_DEB)
    done = subprocess.run(
        ["sh", "-c", f'echo "$0" | {command}', version], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
    assert expected.replace("~dev", ".dev") == version


BUILD_DEB = (ROOT / "script" / "build-deb").read_text() if (ROOT / "script").exists() else ""
