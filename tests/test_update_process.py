"""Updates from end to end: an installation of its own, real processes, and somebody who starts them as systemd does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import pytest_twisted
from process_kit import Client, NotifySocket, eventually
from release_kit import Certificates, Forge, public_pem
from system_kit import chat_body, in_thread, reactor, until
from twisted.internet.threads import deferToThread

from turnstile.install.do import Doer
from turnstile.install.look import look, make_wanted, path_file
from turnstile.install.paths import SERVICE, Paths
from turnstile.install.plan import Systemctl, plan_install
from turnstile.install.source import find_source
from turnstile.sim import GpuHost
from turnstile.update.layout import Layout

CERTIFICATES = Certificates()
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Nobody:
    """A systemd that has nothing to say."""

    def active(self, units: Any) -> frozenset[str]:
        return frozenset()

    enabled = active

    def run(self, verb: str, units: tuple[str, ...] = ()) -> None:
        raise AssertionError(verb)


class Installation:
    """turnstile 0.1.0 below a folder, made by turnstile-service, with a key of the tests' own."""

    def __init__(self, folder: Path, config: str) -> None:
        self.folder = folder
        self.paths = paths = Paths(PYTHON, folder / "machine")
        (folder / "patched").mkdir()
        self.source = source = self._as_release(find_source(), "0.1.0")
        wanted = make_wanted(paths, source, config, copied=True)
        steps = plan_install(wanted, look(paths, source, wanted, Nobody()))
        doer = Doer(paths, source, Nobody(), lambda _: None)
        doer.do(tuple(step for step in steps if not isinstance(step, Systemctl)))
        real = path_file(paths).replace("/var/lib/turnstile", str(paths.root))
        paths.path_file.write_text(real)
        self.layout = Layout(paths.root)
        self.certificates = folder / "ca.pem"
        self.certificates.write_bytes(CERTIFICATES.pem)
        self.log = folder / "log"
        self.log.touch()
        self.notify = NotifySocket(str(folder / "notify"))
        self.process: subprocess.Popen[bytes] | None = None
        self.statuses: list[int] = []

    def _as_release(self, source: Any, version: str) -> Any:
        """The checkout as a released version that trusts the tests' key and is not slow to confirm itself."""
        files = {place: path for place, path in source.release.items() if place.name != "METADATA"}

        def patched(name: str, text: str) -> Path:
            path = self.folder / "patched" / name
            path.write_text(text)
            return path

        key = PurePosixPath("turnstile/update/pubkey.py")
        files[key] = patched("pubkey.py", f"PUBLIC_KEYS = ({public_pem()!r},)\n")
        updater = PurePosixPath("turnstile/update/updater.py")
        text = source.release[updater].read_text()
        assert "CONFIRM_AFTER = 10.0" in text
        files[updater] = patched("updater.py", text.replace("AFTER = 10.0", "AFTER = 0.3"))
        (metadata,) = (path for p, path in source.release.items() if p.name == "METADATA")
        lines = [
            f"Version: {version}" if line.startswith("Version: ") else line
            for line in metadata.read_text().splitlines()
        ]
        place = PurePosixPath(f"turnstile-{version}.dist-info/METADATA")
        files[place] = patched("METADATA", "\n".join(lines) + "\n")
        return attrs.evolve(source, version=version, release=files)

    def wheel(self, version: str, **changes: str) -> bytes:
        """The version that is installed, as a wheel of a newer one; ``changes`` are appended to modules."""
        path = self.folder / "new.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for place, file in self.source.release.items():
                text = file.read_bytes()
                if place.name == "METADATA":
                    text = text.replace(b"\nVersion: 0.1.0\n", f"\nVersion: {version}\n".encode())
                if place.parts[0] == "turnstile" and place.stem in changes:
                    text += changes[place.stem].encode()
                archive.writestr(str(place).replace("0.1.0", version), text)
        return path.read_bytes()

    # -- what systemd does

    def start(self) -> None:
        """ExecStartPre=, then ExecStart=."""
        paths = self.paths
        environ = {
            "PATH": os.environ["PATH"],
            "NOTIFY_SOCKET": self.notify.address,
            "GPU_TURNSTILE_CONFIG": str(paths.config),
            "SSL_CERT_FILE": str(self.certificates),
        }
        with self.log.open("ab") as log:
            more: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            subprocess.run(
                [paths.interpreter, "-I", "-S", paths.boot, paths.root], check=True, **more
            )
            self.process = subprocess.Popen(
                [paths.interpreter, "-I", "-m", "turnstile"], cwd=paths.root, env=environ, **more
            )

    def run_until(self, condition: Any, what: str) -> None:
        """Restart on failure until ``condition`` holds; as quick as can be, for RestartSec is nobody's concern here."""
        deadline = time.monotonic() + 100

        while not condition():
            assert time.monotonic() < deadline, (what, self.lines()[-30:])
            assert self.process is not None
            status = self.process.poll()
            if status is not None:
                self.statuses.append(status)
                assert status != 0
                self.start()
            time.sleep(0.02)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def said(self, text: str) -> list[str]:
        return [line for line in self.lines() if text in line]

    def port(self) -> int:
        line = eventually(lambda: self.said("ollama listens on"), "the listener")[-1]
        return int(line.rpartition("port=")[2].rstrip(")"))

    def hang_up(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self.notify.close()
        shutil.rmtree(self.paths.base)


def long(work: Any, *args: Any) -> Any:
    """Run something that takes its time beside the reactor."""
    return deferToThread(work, *args).addTimeout(120.0, reactor)


CONFIG = """\
OLLAMA_URL={ollama}
LISTEN_OLLAMA=127.0.0.1:0
UPDATE_REPO={repository}
LOGLEVEL=info
SHUTDOWN_TIMEOUT=2s
"""


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest_twisted.ensureDeferred
async def test_an_update_a_broken_one_and_the_way_back(tmp_path: Path) -> None:
    host = GpuHost(reactor, 25.0, comfy=False)
    await host.start()
    forge = Forge(reactor, CERTIFICATES)
    config = CONFIG.format(ollama=host.ollama.url, repository=forge.repository)
    site = await long(Installation, tmp_path, config)
    layout = site.layout

    async def until_said(text: str) -> str:
        await long(site.run_until, lambda: site.said(text), text)
        return site.said(text)[0]

    try:
        # There is no release yet, and a chat that does not end by itself.
        await in_thread(site.start)
        await until_said("status 404")
        client = await in_thread(Client, ("127.0.0.1", site.port()))
        client.send("/api/chat", "POST", json.dumps(chat_body(1_000_000)).encode())
        await until(lambda: host.ollama.active_generations)

        forge.release("0.2.0", site.wheel("0.2.0"))
        site.paths.config.write_text(config + "UPDATE_INTERVAL=60s\n")
        site.hang_up()
        await until_said("turnstile 0.2.0 is installed; it is started as soon as the card is idle")
        assert layout.current == "0.2.0" and layout.on_trial == "0.2.0"
        assert site.said("leaving") == [] and site.statuses == []
        client.close()
        await until_said("version 0.2.0 came up and stays")
        assert site.statuses == [3]
        assert layout.current == "0.2.0" and layout.on_trial is None
        assert site.said("leaving for turnstile 0.2.0") and site.said("turnstile 0.2.0 starting")
        assert site.stop() == 0

        # One that can be imported, and does not come up as a service.
        broken = "\ndef _broken(*_, **__):\n    raise RuntimeError('broken')\nTurnstileService.__init__ = _broken\n"
        forge.release("0.3.0", site.wheel("0.3.0", service=broken))
        site.statuses.clear()
        await in_thread(site.start)
        await until_said("v0.3.0 was tried before and did not come up")
        # It left for the new one, that failed twice, and then the old one was there again.
        assert site.statuses == [3, 1, 1]
        assert len(site.said("RuntimeError: broken")) == 2
        assert site.said("turnstile: version 0.3.0 did not come up 2 times: back to 0.2.0")
        assert layout.current == "0.2.0" and layout.refused == {"0.3.0"}
        assert site.stop() == 0

        # One that does not even start is never put in place.
        forge.release("0.4.0", site.wheel("0.4.0", tap="\nimport nobody_has_this\n"))
        await in_thread(site.start)
        line = await until_said("v0.4.0 is not installed")
        assert "No module named 'nobody_has_this'" in line
        assert layout.current == "0.2.0" and layout.on_trial is None
        assert site.stop() == 0
        assert site.said("Unhandled") == []
    finally:
        await in_thread(site.close)
        await forge.stop()
        await host.stop()


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest_twisted.ensureDeferred
async def test_an_update_by_hand(tmp_path: Path) -> None:
    forge = Forge(reactor, CERTIFICATES)
    config = CONFIG.format(ollama="http://127.0.0.1:1", repository=forge.repository)
    site = await long(Installation, tmp_path, config + "AUTO_UPDATE=off\n")
    code = f"""
import sys
from pathlib import Path
from turnstile.install import cli, paths
class Systemd:
    def active(self, units): return frozenset(units)
    enabled = active
    def run(self, verb, units=()): print(verb, *units)
where = paths.Paths({PYTHON!r}, Path({str(site.paths.base)!r}))
try:
    status = cli.run(cli.make_parser().parse_args(sys.argv[1:]), where, Systemd())
except paths.InstallError as error:
    sys.exit(f"error: {{error}}")
sys.exit(status)
"""

    def run(*arguments: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [site.paths.interpreter, "-I", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            env={"PATH": os.environ["PATH"], "SSL_CERT_FILE": str(site.certificates)},
        )
        return done.returncode, (done.stdout + done.stderr).splitlines()

    try:
        code_, lines = await long(run, "update")
        assert code_ == 1 and "AUTO_UPDATE is off" in lines[-1]
        code_, lines = await long(run, "update", "--force")
        assert code_ == 1 and lines[-1].endswith("status 404")
        forge.release("0.1.0")
        assert await long(run, "update", "--force") == (
            0,
            ["nothing to do: 0.1.0 is the latest release"],
        )
        name = forge.release("0.2.0", site.wheel("0.2.0"))
        assert await long(run, "update", "--force", "--dry-run") == (
            0,
            ["would install turnstile 0.2.0, in place of 0.1.0"],
        )
        assert site.layout.current == "0.1.0"
        signature = forge.files[f"{name}.sig"]
        forge.files[f"{name}.sig"] = bytes(64)
        code_, lines = await long(run, "update", "--force")
        assert code_ == 1 and "is not its publisher's" in lines[-1]
        assert site.layout.current == "0.1.0"
        forge.files[f"{name}.sig"] = signature
        assert await long(run, "update", "--force") == (
            0,
            [
                "turnstile 0.2.0 is in place of 0.1.0",
                f"restart {SERVICE}",
                "the service was restarted",
            ],
        )
        assert site.layout.current == site.layout.on_trial == "0.2.0"
        code_, lines = await long(run, "status")
        assert code_ == 0 and "on trial: 0.2.0, before it was 0.1.0" in lines
    finally:
        await in_thread(site.close)
        await forge.stop()
