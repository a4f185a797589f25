"""``turnstile-service``: what it plans, what it copies, and a whole installation below a folder of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.install import cli, do, source
from turnstile.install import update as install_update
from turnstile.install.look import ALL_UNITS, make_wanted, path_file, release_differs
from turnstile.install.paths import SERVICE, InstallError, Paths, is_hidden
from turnstile.install.plan import (
    CopyDependency,
    CopyRelease,
    MakeFolder,
    MakeVenv,
    Seen,
    Step,
    SwitchRelease,
    Systemctl,
    Wanted,
    WriteFile,
    plan_install,
    plan_remove,
)
from turnstile.install.source import (
    Bundle,
    check_visible,
    closure,
    find_source,
    wanted_requirements,
)
from turnstile.install.unit import packaged, service_unit, unit_files
from turnstile.units import SOCKETS
from turnstile.update import boot, pubkey

OLLAMA_SOCKET, COMFY_SOCKET = "turnstile-ollama.socket", "turnstile-comfy.socket"
ROOT = Path("/var/lib/turnstile")
UNITS = Path("/etc/systemd/system")
CONFIG = Path("/etc/turnstile/turnstile.env")


# -- plans


def wanted(**changes: Any) -> Wanted:
    values: dict[str, Any] = {
        "version": "0.2.0",
        "folders": (ROOT, CONFIG.parent),
        "venv": ROOT / "venv",
        "dependencies": {"attrs": "23", "twisted": "24"},
        "files": {
            UNITS / SERVICE: "unit",
            UNITS / OLLAMA_SOCKET: "socket",
            UNITS / COMFY_SOCKET: "socket",
            ROOT / "boot.py": "boot",
            ROOT / "venv/lib/turnstile.pth": "path",
        },
        "config": (CONFIG, "config"),
        "sockets": {OLLAMA_SOCKET: True, COMFY_SOCKET: False},
        "can_start": True,
    }
    return Wanted(**{**values, **changes})


def installed(w: Wanted, **changes: Any) -> Seen:
    """The machine after an installation, with the service running."""
    sockets = {name for name, wants in w.sockets.items() if wants}
    values: dict[str, Any] = {
        "folders": frozenset(w.folders),
        "venv_problem": "",
        "release_differs": False,
        "current": w.version,
        "files": dict(w.files),
        "has_config": True,
        "active": frozenset({SERVICE, *sockets}),
        "enabled": frozenset({SERVICE, *sockets}),
    }
    return Seen(**{**values, **changes})


def texts(steps: Iterable[Step]) -> list[str]:
    return [str(step) for step in steps]


def test_the_first_time() -> None:
    assert texts(plan_install(wanted(), Seen())) == [
        "make the folder /var/lib/turnstile",
        "make the folder /etc/turnstile",
        "write /etc/turnstile/turnstile.env",
        "make the Python environment /var/lib/turnstile/venv (there is none)",
        "copy attrs 23",
        "copy twisted 24",
        "write /var/lib/turnstile/venv/lib/turnstile.pth",
        "copy turnstile 0.2.0",
        "put version 0.2.0 in place",
        "write /etc/systemd/system/turnstile.service",
        "write /etc/systemd/system/turnstile-ollama.socket",
        "write /etc/systemd/system/turnstile-comfy.socket",
        "write /var/lib/turnstile/boot.py",
        "systemctl daemon-reload",
        "systemctl enable turnstile-ollama.socket turnstile.service",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]


def test_the_second_time() -> None:
    assert plan_install(wanted(), installed(wanted())) == ()


def test_without_an_engine_nothing_is_started() -> None:
    steps = plan_install(
        wanted(can_start=False, sockets=dict.fromkeys((OLLAMA_SOCKET, COMFY_SOCKET), False)), Seen()
    )
    assert [step for step in steps if isinstance(step, Systemctl)] == [Systemctl("daemon-reload")]


def test_once_there_is_an_engine_it_is_started() -> None:
    w = wanted()
    assert texts(plan_install(w, installed(w, active=frozenset(), enabled=frozenset()))) == [
        "systemctl enable turnstile-ollama.socket turnstile.service",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]


def test_a_new_version_is_put_beside_a_service_that_runs() -> None:
    w = wanted()
    assert texts(plan_install(w, installed(w, current="0.1.0", release_differs=True))) == [
        "copy turnstile 0.2.0",
        "put version 0.2.0 in place of 0.1.0",
        "systemctl restart turnstile.service",
    ]


def test_what_cannot_be_changed_under_it_is_changed_while_it_stands_still() -> None:
    w = wanted()
    assert texts(plan_install(w, installed(w, stale=frozenset({"twisted"})))) == [
        "systemctl stop turnstile-ollama.socket turnstile.service",
        "copy twisted 24",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]
    assert texts(plan_install(w, installed(w, release_differs=True)))[1] == "copy turnstile 0.2.0"


def test_what_did_not_run_is_not_started() -> None:
    w = wanted()
    seen = installed(w, active=frozenset(), current="0.1.0", stale=frozenset({"attrs"}))
    steps = plan_install(w, seen)
    assert texts(steps) == ["copy attrs 23", "put version 0.2.0 in place of 0.1.0"]
    # A socket that waits for clients is not the service.
    seen = attrs.evolve(seen, active=frozenset({OLLAMA_SOCKET}))
    assert texts(plan_install(w, seen)) == [
        "systemctl stop turnstile-ollama.socket",
        "copy attrs 23",
        "put version 0.2.0 in place of 0.1.0",
        "systemctl start turnstile-ollama.socket",
    ]


def test_a_unit_that_drifted() -> None:
    w = wanted()
    files = {**w.files, UNITS / SERVICE: "edited"}
    assert texts(plan_install(w, installed(w, files=files))) == [
        "replace /etc/systemd/system/turnstile.service",
        "systemctl daemon-reload",
        "systemctl restart turnstile.service",
    ]


def test_sockets_follow_the_configuration() -> None:
    w = wanted()
    now_both = attrs.evolve(w, sockets={OLLAMA_SOCKET: True, COMFY_SOCKET: True})
    assert texts(plan_install(now_both, installed(w))) == [
        "systemctl stop turnstile.service",
        "systemctl enable turnstile-comfy.socket",
        "systemctl start turnstile-comfy.socket turnstile.service",
    ]
    now_none = attrs.evolve(w, sockets={OLLAMA_SOCKET: False, COMFY_SOCKET: False})
    assert texts(plan_install(now_none, installed(w))) == [
        "systemctl stop turnstile-ollama.socket turnstile.service",
        "systemctl disable turnstile-ollama.socket",
        "systemctl start turnstile.service",
    ]


def test_an_environment_that_does_not_fit_is_made_anew() -> None:
    w = wanted()
    seen = installed(w, venv_problem="it is for Python 3.11, not 3.12")
    assert texts(plan_install(w, seen)) == [
        "systemctl stop turnstile-ollama.socket turnstile.service",
        "make the Python environment /var/lib/turnstile/venv (it is for Python 3.11, not 3.12)",
        "copy attrs 23",
        "copy twisted 24",
        "write /var/lib/turnstile/venv/lib/turnstile.pth",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]


def test_without_a_copy_there_are_only_units() -> None:
    w = wanted(
        version=None,
        venv=None,
        dependencies={},
        folders=(CONFIG.parent,),
        files={UNITS / SERVICE: "unit"},
        sockets={},
    )
    assert texts(plan_install(w, Seen())) == [
        "make the folder /etc/turnstile",
        "write /etc/turnstile/turnstile.env",
        "write /etc/systemd/system/turnstile.service",
        "systemctl daemon-reload",
        "systemctl enable turnstile.service",
        "systemctl start turnstile.service",
    ]


def after(steps: tuple[Step, ...], w: Wanted, seen: Seen) -> Seen:
    """What the machine is like when the steps are done; a service must not run while it is changed."""
    folders, stale, files = set(seen.folders), set(seen.stale), dict(seen.files)
    active, enabled = set(seen.active), set(seen.enabled)
    changes: dict[str, Any] = {}
    for step in steps:
        match step:
            case MakeFolder(path):
                folders.add(path)
            case MakeVenv(path):
                assert not active & {SERVICE, *w.sockets}
                changes["venv_problem"] = ""
                stale = set(w.dependencies)
                files = {p: text for p, text in files.items() if not p.is_relative_to(path)}
            case CopyDependency(name, _):
                assert not active & {SERVICE, *w.sockets}
                stale.discard(name)
            case CopyRelease(version):
                assert version != seen.current or SERVICE not in active
                changes["release_differs"] = False
            case SwitchRelease(_, version):
                changes["current"] = version
            case WriteFile(path, text, is_new):
                if path == w.config[0]:
                    assert is_new and not seen.has_config
                    changes["has_config"] = True
                else:
                    assert is_new == (path not in files)
                    files[path] = text
            case Systemctl("start", units):
                assert not (SERVICE in active and set(units) - {SERVICE})
                active |= set(units)
            case Systemctl("stop", units):
                active -= set(units)
            case Systemctl("enable", units):
                enabled |= set(units)
            case Systemctl("disable", units):
                enabled -= set(units)
            case Systemctl("restart", units):
                assert units == (SERVICE,) and SERVICE in active
    return attrs.evolve(
        seen,
        folders=frozenset(folders),
        stale=frozenset(stale),
        files=files,
        active=frozenset(active),
        enabled=frozenset(enabled),
        **changes,
    )


some_units = st.frozensets(st.sampled_from([SERVICE, OLLAMA_SOCKET, COMFY_SOCKET]))


@given(
    st.builds(
        Seen,
        folders=st.frozensets(st.sampled_from([ROOT, CONFIG.parent])),
        venv_problem=st.sampled_from(["", "odd"]),
        stale=st.frozensets(st.sampled_from(["attrs", "twisted"])),
        release_differs=st.booleans(),
        current=st.sampled_from([None, "0.1.0", "0.2.0"]),
        files=st.dictionaries(
            st.sampled_from(sorted(wanted().files)), st.sampled_from(["unit", "x"])
        ),
        has_config=st.booleans(),
        active=some_units,
        enabled=some_units,
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_machine_converges(seen: Seen, ollama: bool, comfy: bool, can_start: bool) -> None:
    w = wanted(sockets={OLLAMA_SOCKET: ollama, COMFY_SOCKET: comfy}, can_start=can_start)
    if not can_start:
        seen = attrs.evolve(seen, active=frozenset())
    done = after(plan_install(w, seen), w, seen)
    assert done.files == w.files and done.current == w.version and not done.stale
    assert (SERVICE in done.active) == (
        SERVICE in seen.active or (can_start and SERVICE not in seen.enabled)
    )
    assert plan_install(w, done) == ()


def test_removing() -> None:
    w = wanted()
    units = tuple(UNITS / name for name in ALL_UNITS)
    assert texts(plan_remove((ROOT,), units, installed(w))) == [
        "systemctl stop turnstile-ollama.socket turnstile.service",
        "systemctl disable turnstile-ollama.socket turnstile.service",
        "remove /etc/systemd/system/turnstile-ollama.socket",
        "remove /etc/systemd/system/turnstile-comfy.socket",
        "remove /etc/systemd/system/turnstile.service",
        "systemctl daemon-reload",
        "remove /var/lib/turnstile",
    ]
    assert plan_remove((), (), Seen()) == ()


# -- units


def test_the_unit_of_a_copy() -> None:
    paths = Paths("3.11")
    unit = unit_files(paths, paths.inside(paths.interpreter), True)[SERVICE]
    lines = unit.splitlines()
    python = "/var/lib/turnstile/venv/bin/python"
    start = lines.index(f"ExecStart={python} -I -m turnstile")
    assert lines[start - 1] == (
        f"ExecStartPre=-{python} -I -S /var/lib/turnstile/boot.py /var/lib/turnstile"
    )
    assert "RestartForceExitStatus=3" in lines and "SuccessExitStatus=3" in lines
    assert "RestartPreventExitStatus" not in unit and "does not get better" not in unit
    # All the rest is what the package has, the sandbox above all.
    ours, theirs = set(lines), set(packaged(SERVICE).splitlines())
    assert {line.partition("=")[0] for line in theirs - ours if not line.startswith("#")} == {
        "ExecStart",
        "RestartPreventExitStatus",
    }
    for directive in ("DynamicUser=yes", "ProtectSystem=strict", "StateDirectory=turnstile"):
        assert directive in lines


def test_the_unit_without_a_copy() -> None:
    units = unit_files(Paths("3.11"), "/opt/t/bin/python", False)
    assert "ExecStart=/opt/t/bin/python -I -m turnstile" in units[SERVICE].splitlines()
    assert "ExecStartPre" not in units[SERVICE]
    for name in SOCKETS.values():
        assert units[name].endswith(packaged(name))
    assert set(units) == set(ALL_UNITS)


def test_a_packaged_unit_that_is_not_understood() -> None:
    with pytest.raises(ValueError, match="not one ExecStart"):
        service_unit("[Service]\n", "x", None)


def test_units_are_package_data() -> None:
    names = {entry.name for entry in (resources.files("turnstile") / "systemd").iterdir()}
    assert names >= set(ALL_UNITS)


# -- what is copied


def test_requirements() -> None:
    lines = [
        "attrs>=22.2",
        "twisted[tls,http2]>=22.4",
        'pytest>=8; extra == "tests"',
        "Zope.Interface (>=5)",
        'idna ; python_version < "3.8"',
        'typing_extensions>=4; extra == "all-non-platform" or extra == "tests"',
        "???",
    ]
    assert dict(wanted_requirements(lines, set())) == {
        "attrs": set(),
        "twisted": {"tls", "http2"},
        "zope-interface": set(),
        "idna": set(),
    }
    assert set(dict(wanted_requirements(lines, {"tests"}))) >= {"pytest", "typing-extensions"}


class Dist:
    def __init__(self, *requires: str) -> None:
        self.requires = list(requires)


def test_the_closure() -> None:
    dists: dict[str, Any] = {
        "turnstile": Dist("a[x]", "b", 'dev; extra == "tests"'),
        "a": Dist("c", 'd; extra == "x"', 'e; extra == "y"'),
        "b": Dist("a[y]", "turnstile"),
        "c": Dist("not-installed"),
        "d": Dist(),
        "e": Dist(),
        "dev": Dist(),
    }
    assert set(closure("turnstile", dists.get)) == {"turnstile", "a", "b", "c", "d", "e"}
    dists |= {"service-identity": Dist(), "six": Dist()}
    assert set(closure("service-identity", dists.get)) == {"service-identity", "six"}


def test_what_this_environment_consists_of() -> None:
    found = find_source()
    names = {bundle.name for bundle in found.dependencies}
    assert {"twisted", "treq", "attrs", "autobahn", "cryptography", "service-identity"} <= names
    assert not names & {"pytest", "mypy", "turnstile", "ruff"}
    (twisted,) = (bundle for bundle in found.dependencies if bundle.name == "twisted")
    assert PurePosixPath("twisted/internet/base.py") in twisted.files
    assert not any(".." in place.parts or place.suffix == ".pyc" for place in twisted.files)
    assert PurePosixPath("turnstile/service.py") in found.release
    assert PurePosixPath("twisted/plugins/turnstile_plugin.py") in found.release
    assert {place.name for place in found.release if "dist-info" in str(place)} == {"METADATA"}


def test_what_pip_did_not_install_is_not_copied() -> None:
    class Debians:
        metadata: Any = {"Name": "Twisted"}
        version = "22.4.0"
        files = None

        def read_text(self, name: str) -> None:
            return None

    with pytest.raises(InstallError, match="twisted was not installed by pip"):
        source.bundle(Debians())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path", ["/home/u/venv/bin/python", "/root/x", "/tmp/x/y", "/var/tmp/x", "/run/user/7/x"]
)
def test_folders_that_the_sandbox_hides(path: str) -> None:
    assert is_hidden(Path(path))
    with pytest.raises(InstallError, match="hides from it"):
        check_visible(Path(path), "the Python to run")


def test_folders_that_it_does_not_hide(tmp_path: Path) -> None:
    for path in ("/usr/bin/python3", "/opt/x", "/homely", "/tmpx"):
        check_visible(Path(path), "x")
    assert not is_hidden(Path("/"))


# -- a whole installation


class Machine:
    """systemd, as far as it is asked."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.registered: set[str] = set()
        self.calls: list[str] = []
        self.fails = ""

    def active(self, units: Iterable[str]) -> frozenset[str]:
        return frozenset(self.running.intersection(units))

    def enabled(self, units: Iterable[str]) -> frozenset[str]:
        return frozenset(self.registered.intersection(units))

    def run(self, verb: str, units: tuple[str, ...] = ()) -> None:
        self.calls.append(" ".join((verb, *units)))
        if verb == self.fails:
            raise InstallError(f"systemctl {verb}: it failed")
        if verb in ("start", "stop"):
            (self.running.update if verb == "start" else self.running.difference_update)(units)
        elif verb in ("enable", "disable"):
            change = (
                self.registered.update if verb == "enable" else self.registered.difference_update
            )
            change(units)


class Site:
    """A machine below a folder, and the command run on it."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, src: source.Source) -> None:
        self.paths = Paths(f"{sys.version_info.major}.{sys.version_info.minor}", base)
        self.machine = Machine()
        self.source = src
        monkeypatch.setattr(cli, "find_source", lambda: self.source)
        monkeypatch.setattr(cli, "check_visible", self._check_visible)
        self.umask = os.umask(0o077)

    def _check_visible(self, path: Path, what: str) -> None:
        # The Python of whoever runs the tests may be anywhere.
        if path != self.source.home:
            check_visible(path, what)

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        said: list[str] = []
        options = cli.make_parser().parse_args(arguments)
        status = cli.run(options, self.paths, self.machine, said.append)
        return status, said

    def install(self, *arguments: str) -> list[str]:
        status, said = self.run("install", *arguments)
        assert status == 0
        return said

    def refused(self, *arguments: str) -> str:
        with pytest.raises(InstallError) as caught:
            self.run(*arguments)
        return str(caught.value)

    def snapshot(self) -> dict[str, Any]:
        """Every file below the folder."""
        found: dict[str, Any] = {}
        for path in sorted(self.paths.base.rglob("*")):
            stat = path.lstat()
            name = str(path.relative_to(self.paths.base))
            content = os.readlink(path) if path.is_symlink() else stat.st_mtime_ns
            found[name] = (oct(stat.st_mode), stat.st_ino, content)
        return found


@pytest.fixture
def small(tmp_path: Path) -> source.Source:
    """Something to install that is as small as can be."""
    lib = tmp_path / "lib"
    for name, text in {
        "turnstile/__init__.py": "",
        "twisted/plugins/turnstile_plugin.py": "",
        "dep/__init__.py": "x = 1\n",
        "dep-1.0.dist-info/RECORD": "dep/__init__.py,,\ndep/old.py,,\ndep-1.0.dist-info/RECORD,,\n",
        "other.py": "",
        "METADATA": "Metadata-Version: 2.1\nName: turnstile\nVersion: 0.1.0\n",
    }.items():
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text(text)

    def at(*names: str) -> dict[PurePosixPath, Path]:
        return {PurePosixPath(name): lib / name for name in names}

    release = at("turnstile/__init__.py", "twisted/plugins/turnstile_plugin.py")
    release[PurePosixPath("turnstile-0.1.0.dist-info/METADATA")] = lib / "METADATA"
    return source.Source(
        version="0.1.0",
        release=release,
        dependencies=(
            Bundle("dep", "1.0", at("dep/__init__.py", "dep-1.0.dist-info/RECORD")),
            Bundle("other", "2.0", at("other.py")),
        ),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        home=find_source().home,
        interpreter=Path("/opt/source/bin/python"),
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: source.Source) -> Any:
    found = Site(tmp_path / "machine", monkeypatch, small)
    yield found
    os.umask(found.umask)


ENGINE = "OLLAMA_URL=http://127.0.0.1:11435\n"


def given_config(site: Site, text: str = ENGINE) -> str:
    path = site.paths.base.parent / "given.env"
    path.write_text(text)
    return f"--config={path}"


def test_installing_on_a_new_machine(site: Site) -> None:
    said = site.install(given_config(site))
    paths = site.paths
    assert paths.config.read_text() == ENGINE
    assert oct(paths.config.stat().st_mode) == "0o100644"
    assert (paths.releases / "0.1.0/turnstile/__init__.py").exists()
    assert os.readlink(paths.root / "current") == "releases/0.1.0"
    assert (paths.site_packages / "dep/__init__.py").read_text() == "x = 1\n"
    assert paths.path_file.read_text() == path_file(paths)
    assert paths.interpreter.resolve().exists()
    assert site.machine.running == {SERVICE, OLLAMA_SOCKET}
    assert site.machine.registered == {SERVICE, OLLAMA_SOCKET}
    assert site.machine.calls == [
        "daemon-reload",
        "enable turnstile-ollama.socket turnstile.service",
        "start turnstile-ollama.socket turnstile.service",
    ]
    assert said[-1] == "systemctl start turnstile-ollama.socket turnstile.service"
    # Whatever the umask: the service's user has to read it.
    for path in paths.root.rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044, path


def test_the_second_run_changes_nothing(site: Site) -> None:
    site.install(given_config(site))
    before, calls = site.snapshot(), list(site.machine.calls)
    assert site.install(given_config(site)) == ["nothing to do: everything is as it should be"]
    assert site.install("--dry-run") == ["nothing would be done: everything is as it should be"]
    assert (site.snapshot(), site.machine.calls) == (before, calls)


def test_a_dry_run_changes_nothing(site: Site) -> None:
    said = site.install("--dry-run", given_config(site))
    assert not site.paths.base.exists() and site.machine.calls == []
    assert "would copy turnstile 0.1.0" in said and len(said) > 10
    assert all(line.startswith("would ") for line in said)


def test_a_configuration_is_never_overwritten(site: Site) -> None:
    site.paths.config.parent.mkdir(parents=True)
    site.paths.config.write_text("# mine\n" + ENGINE)
    site.install(given_config(site, "COMFY_URL=http://127.0.0.1:1\n"))
    assert site.paths.config.read_text() == "# mine\n" + ENGINE
    assert site.machine.running == {SERVICE, OLLAMA_SOCKET}


def test_without_a_configuration_there_is_one_to_fill_in(site: Site) -> None:
    said = site.install()
    text = site.paths.config.read_text()
    assert "#OLLAMA_URL=" in text and "\nOLLAMA_URL" not in text
    assert site.machine.calls == ["daemon-reload"]
    assert said[-2].startswith("not started: no engine: set OLLAMA_URL")
    assert str(site.paths.config) in said[-1]
    site.paths.config.write_text(text + ENGINE)
    assert site.install() == [
        "systemctl enable turnstile-ollama.socket turnstile.service",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]


def test_only_what_drifted_is_refreshed(site: Site) -> None:
    site.install(given_config(site))
    (site.paths.site_packages / "dep/__init__.py").write_text("x = 2\n")
    (site.paths.site_packages / "dep/old.py").write_text("left over")
    site.machine.calls.clear()
    assert site.install() == [
        "systemctl stop turnstile-ollama.socket turnstile.service",
        "copy dep 1.0",
        "systemctl start turnstile-ollama.socket turnstile.service",
    ]
    assert (site.paths.site_packages / "dep/__init__.py").read_text() == "x = 1\n"
    assert not (site.paths.site_packages / "dep/old.py").exists()
    release = site.paths.releases / "0.1.0"
    (release / "turnstile/stray.py").touch()
    assert site.install()[1] == "copy turnstile 0.1.0"
    assert not (release / "turnstile/stray.py").exists()
    (release / "turnstile/__pycache__").mkdir()
    (release / "turnstile/__pycache__/x.pyc").touch()
    assert site.install() == ["nothing to do: everything is as it should be"]
    site.paths.boot.unlink()
    (site.paths.units / SERVICE).write_text("edited")
    assert site.install() == [
        f"replace {site.paths.units / SERVICE}",
        f"write {site.paths.boot}",
        "systemctl daemon-reload",
        "systemctl restart turnstile.service",
    ]


def test_a_newer_version(site: Site) -> None:
    site.install(given_config(site))
    boot.write_state(
        site.paths.root,
        {"version": None, "previous": None, "attempts": 0, "refused": ["0.2.0", "0.3.0"]},
    )
    site.source = attrs.evolve(site.source, version="0.2.0")
    assert site.install() == [
        "copy turnstile 0.2.0",
        "put version 0.2.0 in place of 0.1.0",
        "systemctl restart turnstile.service",
    ]
    state = boot.read_state(site.paths.root)
    assert state == {"version": None, "previous": "0.1.0", "attempts": 0, "refused": ["0.3.0"]}
    assert boot.prepare(site.paths.root) is None


def test_an_environment_of_another_python(site: Site) -> None:
    site.install(given_config(site))
    cfg = site.paths.venv / "pyvenv.cfg"
    text = cfg.read_text()
    for wrong, why in (
        (text.replace(str(site.source.home), "/opt/other"), "it stands on /opt/other"),
        (text.replace("version = 3.", "version = 2."), "it is for Python 2."),
    ):
        assert wrong != text
        cfg.write_text(wrong)
        said = site.install()
        assert why in said[1] and "copy other 2.0" in said
        assert site.install() == ["nothing to do: everything is as it should be"]
    site.paths.interpreter.unlink()
    assert "its Python is gone" in site.install()[1]


def test_links_that_the_services_user_made_are_not_followed(site: Site) -> None:
    site.install(given_config(site))
    elsewhere = site.paths.base.parent / "elsewhere"
    elsewhere.mkdir()
    package = site.paths.site_packages / "dep"
    shutil.rmtree(package)
    package.symlink_to(elsewhere)
    said = site.install()
    assert said[1].endswith("(it holds links to other folders)")
    assert list(elsewhere.iterdir()) == [] and (package / "__init__.py").exists()
    assert not package.is_symlink()
    for name in ("releases", "venv"):
        path = site.paths.root / name
        path.rename(elsewhere / name)
        path.symlink_to(elsewhere / name)
        said_ = site.refused("install")
        assert said_ == f"{path} is a symbolic link, which it should not be: remove it"
        with pytest.raises(InstallError, match="is a symbolic link"):
            install_update.update(site.paths, site.machine, print, force=True, dry_run=True)
        path.unlink()
        (elsewhere / name).rename(path)


def test_it_does_not_saw_off_its_own_branch(site: Site) -> None:
    site.source = attrs.evolve(site.source, interpreter=site.paths.interpreter)
    assert "run this from another environment" in site.refused("install", given_config(site))
    assert not site.paths.root.exists()


def test_a_service_whose_configuration_was_broken_meanwhile_is_left_alone(site: Site) -> None:
    site.install(given_config(site))
    site.paths.config.write_text("nonsense\n")
    before = site.snapshot()
    said = site.refused("install")
    assert said.startswith("the service runs, but could not be started again: ")
    assert "not a KEY=VALUE line" in said
    assert site.snapshot() == before and SERVICE in site.machine.running


def test_a_service_that_was_stopped_stays_so(site: Site) -> None:
    site.install(given_config(site))
    site.machine.running.clear()
    site.source = attrs.evolve(site.source, version="0.2.0")
    said = site.install()
    assert said[-1].startswith("the service did not run before, and was not started")
    assert site.machine.running == set()


def test_a_start_that_fails_is_told(site: Site) -> None:
    site.machine.fails = "start"
    said = site.refused("install", given_config(site))
    assert said == "systemctl start: it failed (journalctl -u turnstile.service tells why)"


def test_the_debian_package_comes_first(site: Site) -> None:
    unit = site.paths.base / "usr/lib/systemd/system/turnstile.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    for command in ("install", "remove", "status"):
        assert "installed as a package of the system" in site.refused(command)


def test_no_copy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.turnstile, "__file__", "/opt/source/lib/turnstile/__init__.py")
    site.install("--no-copy", given_config(site))
    assert not site.paths.root.exists()
    unit = (site.paths.units / SERVICE).read_text()
    assert "ExecStart=/opt/source/bin/python -I -m turnstile\n" in unit
    assert site.install("--no-copy") == ["nothing to do: everything is as it should be"]
    assert site.machine.running == {SERVICE, OLLAMA_SOCKET}
    status, said = site.run("status")
    assert status == 0 and said[0] == "version: the one of the environment that the unit names"


def test_a_python_that_the_service_could_not_see(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.source = attrs.evolve(site.source, home=Path("/home/u/.pyenv/versions/3.12/bin"))
    monkeypatch.setattr(cli, "check_visible", check_visible)
    assert "the Python that this environment stands on is /home/u" in site.refused("install")
    assert not site.paths.base.exists()


def test_no_copy_of_what_the_service_could_not_see(site: Site) -> None:
    site.source = attrs.evolve(site.source, interpreter=Path("/home/u/venv/bin/python"))
    assert "which the service's sandbox hides from it" in site.refused("install", "--no-copy")


def test_a_given_configuration_that_cannot_be_read(site: Site) -> None:
    said = site.refused("install", "--config=/dev/null/x")
    assert said == "configuration file /dev/null/x: can't be read: Not a directory"


def test_removing_it_all(site: Site) -> None:
    site.install(given_config(site))
    # As systemd leaves it after the first start.
    private = site.paths.root.parent / "private"
    private.mkdir()
    site.paths.root.rename(private / "turnstile")
    site.paths.root.symlink_to("private/turnstile")
    assert site.install() == ["nothing to do: everything is as it should be"]
    before = site.snapshot()
    _, said = site.run("remove", "--dry-run")
    assert said[0] == "would systemctl stop turnstile-ollama.socket turnstile.service"
    assert site.snapshot() == before
    status, said = site.run("remove")
    assert status == 0 and said[-1] == f"{site.paths.config.parent} stays, with the configuration"
    left = [path for path in site.paths.base.rglob("*") if path.is_file() or path.is_symlink()]
    assert left == [site.paths.config]
    assert site.machine.running == site.machine.registered == set()
    assert site.run("remove") == (0, ["nothing to do: the service is not installed"])
    assert site.run("status") == (
        4,
        ["turnstile is not installed as a service (turnstile-service install)"],
    )


def test_the_status(site: Site) -> None:
    site.install(given_config(site))
    assert site.run("status") == (
        0,
        [
            f"version: 0.1.0 in {site.paths.root}",
            "turnstile-ollama.socket: running, enabled",
            "turnstile.service: running, enabled",
            f"configuration: {site.paths.config}",
        ],
    )
    boot.write_state(
        site.paths.root,
        {"version": "0.1.0", "previous": "0.0.9", "attempts": 1, "refused": ["0.3.0"]},
    )
    site.machine.running.clear()
    site.paths.config.write_text("")
    status, said = site.run("status")
    assert status == 3
    assert "on trial: 0.1.0, before it was 0.0.9" in said and "did not come up: 0.3.0" in said
    assert said[-1].startswith("configuration: no engine")


def test_a_step_that_fails_is_told_in_one_line(site: Site) -> None:
    (site.paths.base / "var").mkdir(parents=True)
    (site.paths.base / "var/lib").touch()
    said = site.refused("install", given_config(site))
    assert said.startswith("make the folder ") and "Not a directory" in said


def test_files_belong_to_whom_the_folder_belongs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_to: set[tuple[str, int, int]] = set()

    def chown(path: Any, user: int, group: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        given_to.add((str(path), user, group))

    monkeypatch.setattr(os, "chown", chown)
    tree = site.paths.base.parent / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a/b").touch()
    (tree / "link").symlink_to("/etc/passwd")
    do.own_tree(tree, 12345, 6789)
    names = ("", "/a", "/a/b", "/link")
    assert given_to == {(f"{tree}{name}", 12345, 6789) for name in names}
    given_to.clear()
    do.own_tree(tree, os.getuid(), os.getgid())
    assert given_to == set()


# -- the command


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnstile.install", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        **more,
    )


def test_help_and_version() -> None:
    done = command("--help")
    assert done.returncode == 0
    for word in ("install", "remove", "status", "update", "--install-service", "/etc/turnstile"):
        assert word in done.stdout
    assert command("--version").stdout.startswith("turnstile ")
    assert command().returncode == 2
    assert command("nonsense").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "wanted_options"),
    [
        (["--install-service", "--config", "x"], {"command": "install", "config": "x"}),
        (["--config", "x", "--install-service"], {"command": "install", "config": "x"}),
        (["service", "install", "--no-copy"], {"command": "install", "no_copy": True}),
        (["--remove-service", "--dry-run"], {"command": "remove", "dry_run": True}),
        (["--force-update"], {"command": "update", "force": True}),
        (["update"], {"command": "update", "force": False}),
        (["status"], {"command": "status"}),
    ],
)
def test_names_of_the_commands(
    arguments: list[str], wanted_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run(options: Any, paths: Paths) -> int:
        seen.append(options)
        return 7

    monkeypatch.setattr(cli, "run", run)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 7
    (options,) = seen
    assert {name: getattr(options, name) for name in wanted_options} == wanted_options


@pytest.mark.parametrize(
    ("platform", "hint"), [("win32", "WSL 2"), ("darwin", "launchd"), ("freebsd14", "elsewhere")]
)
def test_other_systems(
    platform: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SystemExit) as caught:
        cli.main(["install"])
    assert caught.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("turnstile-service: it makes a systemd service, which only Linux has; ")
    assert hint in err and err.count("\n") == 1


def test_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("install", "remove", "update"):
        options = cli.make_parser().parse_args([name])
        with pytest.raises(InstallError, match=f"this needs root: sudo .*turnstile-service {name}"):
            cli.run(options, Paths("3.11"), Machine())


def test_a_machine_without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/run/systemd/system").exists():
        pytest.skip("systemd runs this one")
    with pytest.raises(InstallError, match="this machine is not run by systemd"):
        cli.run(cli.make_parser().parse_args(["status"]), Paths("3.11"))


def fake_systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "systemctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_systemctl_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnstile.install.systemd import Systemd

    fake_systemctl(
        tmp_path,
        monkeypatch,
        'case "$1 $2" in "is-active a") echo active;; "is-active b") echo inactive; exit 3;;'
        ' "is-active c") echo activating;; "is-enabled a") echo enabled;;'
        ' "is-enabled b") echo static;; "is-enabled c") exit 1;; "start x") exit 0;;'
        ' *) echo "it  went\nwrong" >&2; exit 5;; esac',
    )
    systemd = Systemd()
    assert systemd.active("abc") == {"a", "c"}
    assert systemd.enabled("abc") == {"a"}
    systemd.run("start", ("x",))
    with pytest.raises(InstallError, match="systemctl start y: it went wrong"):
        systemd.run("start", ("y",))
    monkeypatch.setenv("PATH", "/dev/null")
    with pytest.raises(InstallError, match="there is no systemctl"):
        systemd.active("a")


# -- updating by hand


def updating(site: Site, config: str = "", **more: Any) -> Any:
    """``turnstile-service update``, as far as it comes without a network."""
    site.install(given_config(site, ENGINE + config))
    return install_update.update(
        site.paths, site.machine, lambda _: None, force=False, dry_run=False, **more
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", "UPDATE_REPO is not set"),
        ("UPDATE_REPO=https://x/y/z\nAUTO_UPDATE=off\n", "AUTO_UPDATE is off .*--force"),
    ],
)
def test_updates_by_hand_that_are_not_wanted(site: Site, config: str, reason: str) -> None:
    with pytest.raises(InstallError, match=reason):
        updating(site, config)


def test_settings_of_updates_by_hand(site: Site) -> None:
    with pytest.raises(InstallError, match="no turnstile is installed"):
        install_update.update(site.paths, site.machine, print, force=True, dry_run=True)
    config = site.paths.config
    config.parent.mkdir(parents=True)
    config.write_text("UPDATE_REPO=http://x/y/z\n")
    with pytest.raises(InstallError, match=r"UPDATE_REPO: .* over https"):
        install_update.read_settings(site.paths)
    config.write_text("nonsense\n")
    with pytest.raises(InstallError, match="not a KEY=VALUE line"):
        install_update.read_settings(site.paths)
    # No engine is needed for it.
    config.write_text("UPDATE_REPO=https://x/y/z\nUPDATE_ASSET=a-*.whl\nAUTO_UPDATE=yes\n")
    settings = install_update.read_settings(site.paths)
    assert (str(settings.update_repo), settings.update_asset, settings.auto_update) == (
        "https://x/y/z",
        "a-*.whl",
        True,
    )
    assert pubkey.PUBLIC_KEYS == ()


# -- a real one


@pytest.mark.slow
def test_what_was_installed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that turnstile needs is copied: it runs from there, and from nowhere else."""
    real = Site(tmp_path / "machine", monkeypatch, find_source())
    try:
        real.install(given_config(real))
        assert real.install() == ["nothing to do: everything is as it should be"]
    finally:
        os.umask(real.umask)
    paths = real.paths
    # The path in it is that of a real machine.
    paths.path_file.write_text(path_file(paths).replace("/var/lib/turnstile", str(paths.root)))
    code = (
        "import sys, turnstile, twisted, treq, cryptography\n"
        "print(turnstile.__file__, twisted.__file__, treq.__file__, cryptography.__file__)\n"
    )
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [paths.interpreter, "-I", "-c", code], capture_output=True, text=True, env=environ, cwd="/"
    )
    assert done.stderr == "" and done.returncode == 0
    own, *others = done.stdout.split()
    assert own == str(paths.releases / real.source.version / "turnstile/__init__.py")
    assert all(path.startswith(str(paths.site_packages)) for path in others)
    done = subprocess.run(
        [paths.interpreter, "-I", "-m", "turnstile", "--version"],
        capture_output=True,
        text=True,
        env=environ,
        cwd="/",
    )
    assert done.stdout == f"turnstile {metadata.version('turnstile')}\n"
    assert not release_differs(real.source.release, paths.releases / real.source.version)
    shutil.rmtree(paths.base)


def test_the_wanted_service_of_a_real_machine() -> None:
    paths = Paths("3.11")
    w = make_wanted(paths, find_source(), ENGINE, copied=True)
    assert set(w.files) == {
        UNITS / SERVICE,
        UNITS / OLLAMA_SOCKET,
        UNITS / COMFY_SOCKET,
        ROOT / "boot.py",
        ROOT / "venv/lib/python3.11/site-packages/turnstile.pth",
    }
    assert "/var/lib/turnstile/current" in path_file(paths)
