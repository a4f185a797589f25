"""Root file systems to test in, made with debootstrap and apt from Debian's archive, and kept for the next time.

Three of them: ``base``, a small system that boots, with the archives of what the package depends on at hand but not
installed; ``build``, where packages are built; ``pip``, base with Python's own means of installing, and the wheels of
what turnstile depends on.
"""

import configparser
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
#: The version of Python that it has.
PYTHON = "3.11"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
#: In what boots. udev would only slow it down; the rest is what the checks use.
SYSTEM = ["systemd", "systemd-sysv", "dbus", "logrotate", "bash-completion", "openssl"]
BUILD = ["dpkg-dev", "devscripts", "lintian", "man-db"]
PIP = ["python3-venv", "ca-certificates"]
#: To be raised when what is done here changes.
RECIPE = 3

_APT = """\
Acquire::Languages "none";
Acquire::Retries "3";
APT::Install-Recommends "false";
Binary::apt::APT::Keep-Downloaded-Packages "true";
APT::Keep-Downloaded-Packages "true";
Dpkg::Use-Pty "false";
"""


def run(*command: str, **options: object) -> None:
    """Run, with the output to the log; raises `SystemExit` with its end if it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise SystemExit(f"{end}\ntest-deb: failed: {' '.join(command)}")


class Image:
    """One root file system below the cache's folder."""

    def __init__(self, cache: Path, name: str, ingredients: object) -> None:
        recipe = json.dumps([RECIPE, SUITE, MIRROR, ingredients])
        self.name = name
        self.path = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
        self._draft = cache / f"{name}.draft"

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    def begin(self) -> Path:
        """An empty place to make it in; older ones of its name go."""
        for old in self.path.parent.glob(f"{self.name}[-.]*"):
            shutil.rmtree(old)
        return self._draft

    def keep(self) -> None:
        """It is complete."""
        self._draft.rename(self.path)


def _chroot(root: Path, *command: str) -> None:
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C.UTF-8",
        **{key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")},
    }
    run("chroot", str(root), *command, env=environ)


def _apt(root: Path, *arguments: str) -> None:
    # Names are resolved as they are out here.
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    _chroot(root, "apt-get", "--quiet", "--yes", *arguments)
    (root / "etc/resolv.conf").unlink()


def _relations(field: str) -> list[str]:
    """The packages that a field of debian/control names."""
    text = (ROOT / "debian/control").read_text()
    match = re.search(rf"(?m)^{field}:((?:.*\n)(?:[ \t].*\n)*)", text)
    assert match is not None
    names = [re.split(r"[ (]", name.strip())[0] for name in match[1].split(",")]
    return [name for name in names if name and not name.startswith("$")]


def _make_base(image: Image, archives: list[str]) -> None:
    root = image.begin()
    run("debootstrap", "--variant=minbase", SUITE, str(root), MIRROR)
    (root / "etc/apt/apt.conf.d/90test").write_text(_APT)
    # Nobody minds losing it in a power cut.
    (root / "etc/dpkg/dpkg.cfg.d/90test").write_text("force-unsafe-io\n")
    (root / "etc/hostname").write_text("turnstile-test\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 turnstile-test\n")
    _apt(root, "update")
    _apt(root, "install", *SYSTEM)
    # Nobody logs in, nothing is mounted, no network is set up.
    for unit in (
        "getty.target",
        "console-getty.service",
        "systemd-logind.service",
        "apt-daily.timer",
        "apt-daily-upgrade.timer",
        "e2scrub_all.timer",
        "fstrim.timer",
    ):
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    _apt(root, "install", "--download-only", *archives)
    image.keep()


def _requirements() -> list[str]:
    """What pip needs to install and to build turnstile."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = [line for line in setup["options"]["install_requires"].splitlines() if line]
    return [*needed, "setuptools", "setuptools-scm", "wheel"]


def _download_wheels(folder: Path, requirements: list[str]) -> None:
    """The wheels of ``requirements`` for the images' Python, by the pip that works out here."""
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        run("sh", str(ROOT / "script/bootstrap"), "run")
    pip = [str(python), "-m", "pip"]
    machine = platform.machine()
    platforms = ["manylinux2014", "manylinux_2_28", "manylinux_2_34"]
    run(
        *pip,
        "download",
        "--quiet",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        *(f"--platform={name}_{machine}" for name in platforms),
        f"--dest={folder}",
        *requirements,
    )


def _make_more(
    image: Image, base: Image, packages: list[str], then: Callable[[Path], None] | None = None
) -> None:
    root = image.begin()
    run("cp", "--archive", "--reflink=auto", str(base.path), str(root))
    _apt(root, "install", *packages)
    if then is not None:
        then(root)
    image.keep()


def prepare(cache: Path) -> dict[str, Path]:
    """Make what is missing; returns where each is."""
    cache.mkdir(parents=True, exist_ok=True)
    archives = _relations("Depends")
    build = [
        *BUILD,
        *(
            "debhelper" if name == "debhelper-compat" else name
            for name in _relations("Build-Depends")
        ),
    ]
    wheels = _requirements()
    images = {
        "base": Image(cache, "base", [SYSTEM, archives]),
        "build": Image(cache, "build", [SYSTEM, archives, build]),
        "pip": Image(cache, "pip", [SYSTEM, archives, PIP, wheels]),
    }
    for image in images.values():
        if image.exists:
            continue
        print(f"test-deb: making the image {image.name} (once)", flush=True)
        if image.name == "base":
            _make_base(image, archives)
        elif image.name == "build":
            _make_more(image, images["base"], build)
        else:
            _make_more(
                image,
                images["base"],
                PIP,
                lambda root: _download_wheels(root / "srv/wheels", wheels),
            )
    return {name: image.path for name, image in images.items()}


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
