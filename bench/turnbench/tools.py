"""The programs that a benchmark needs: found, or said how to get; and the Go ones built."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import twisted
from turnstile import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
GO = ROOT / "bench" / "go"
BUILD = ROOT / "bench" / "build"

#: Program, what it is for, Debian's package.
WANTED = (
    ("wrk", "requests a second; without it a slower client of our own", "wrk"),
    ("nginx", "a reference", "nginx-light"),
    ("haproxy", "a reference", "haproxy"),
)


def find(program: str) -> str | None:
    """The path of a program; also where only root's PATH would look."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")


def build_go() -> None:
    """Build the upstream, the Go reference and the load client, offline; ends the process if that can't be."""
    go = find("go")
    if go is None:
        raise SystemExit("bench: Go is needed (Debian: apt install golang-go)")
    environ = {**os.environ, "GOPROXY": "off", "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0"}
    BUILD.mkdir(exist_ok=True)
    done = subprocess.run(
        [go, "build", "-o", f"{BUILD}/", "./..."],
        cwd=GO,
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"bench: go build failed:\n{done.stderr}")


def missing() -> list[str]:
    """A line for each program that is not there."""
    return [
        f"{program} is not there ({purpose}); Debian: apt install {package}"
        for program, purpose, package in WANTED
        if find(program) is None
    ]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def facts() -> dict[str, str]:
    """What the figures depend on."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    optimized = "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))

    result = {
        "machine": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} CPUs",
        "system": f"{platform.system()} {platform.release()}",
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "turnstile": __version__,
        "python": f"{platform.python_version()}, "
        + ("optimized build" if optimized else "not an optimized build"),
        "twisted": twisted.__version__,
        "go": _output(find("go") or "go", "version").removeprefix("go version "),
    }
    for program, option in (("nginx", "-v"), ("haproxy", "-v"), ("wrk", "-v")):
        path = find(program)
        if path is not None:
            version = re.search(r"\d+\.\d+[^\s]*", _output(path, option))
            result[program] = version[0] if version else "?"
    assert sys.platform == "linux", "figures are read from /proc"
    return result
