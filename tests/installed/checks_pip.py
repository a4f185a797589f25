"""Installations by pip: ``turnstile-service`` makes the service, signed releases update it."""

import base64
import json
import shlex

from build import Workshop
from checks_service import start_engines
from http_client import COMFY, OLLAMA, Pinger, expect, is_open
from machine import Failed, Machine, until
from report import Report

USER = "/opt/user"
COMMAND = f"{USER}/bin/turnstile-service"
CONFIG = "/etc/turnstile/turnstile.env"
FIRST, SECOND, LAST = "0.9.0", "0.9.1", "0.9.4"
#: What is wrong with some releases: the end of their service.py.
BROKEN = {
    "0.9.2": "raise RuntimeError('a release that cannot be imported')\n",
    "0.9.3": """
def _fail(service: TurnstileService) -> None:
    raise RuntimeError("a release that does not come up")


TurnstileService.startService = _fail  # type: ignore[method-assign]
""",
}
RELEASES = (FIRST, SECOND, *BROKEN, LAST)
_KEY = "/srv/key"


def build(report: Report, workshop: Workshop, _: str) -> dict[str, bytes] | None:
    """Wheels of several versions, with a throw-away key in them, and their signatures; by name."""
    report.section("Wheels are built and signed")
    files: dict[str, bytes] = {}

    def wheels() -> str:
        workshop.run(
            f"openssl genpkey -algorithm ed25519 -out {_KEY}.pem"
            f" && openssl pkey -in {_KEY}.pem -pubout -out {_KEY}.pub"
        )
        key = workshop.take(f"{_KEY}.pub").decode()
        for version in RELEASES:
            folder = workshop.unpack(f"wheel-{version}")
            (folder / "turnstile/update/pubkey.py").write_text(
                f'"""The key."""\n\nPUBLIC_KEYS: tuple[str, ...] = ({key!r},)\n'
            )
            service = folder / "turnstile/service.py"
            service.write_text(service.read_text() + "\n" + BROKEN.get(version, ""))
            workshop.run(
                f"cd /srv/wheel-{version} && python3 -m build --wheel --no-isolation --outdir /srv/wheels",
                SETUPTOOLS_SCM_PRETEND_VERSION=version,
            )
            name = f"turnstile-{version}-py3-none-any.whl"
            workshop.run(
                f"cd /srv/wheels && openssl pkeyutl -sign -rawin -inkey {_KEY}.pem -in {name} -out {name}.sig"
                f" && sha256sum {name} > {name}.sha256"
            )
            for suffix in ("", ".sig", ".sha256"):
                files[name + suffix] = workshop.take(f"/srv/wheels/{name}{suffix}")
        return f"{', '.join(RELEASES)} ({' and '.join(BROKEN)} are broken), an Ed25519 key of openssl's"

    return files if report.check("python3 -m build, openssl", wheels) else None


def run(report: Report, machine: Machine, files: dict[str, bytes]) -> None:
    """All of it, in a system of its own."""
    folder = machine.root / "srv/releases"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if _service(report, machine):
        _updates(report, machine)
        _removal(report, machine)


def _install(machine: Machine, version: str) -> None:
    """What a person does: an environment, and pip."""
    machine.run(
        f"test -d {USER} || python3 -m venv {USER}; {USER}/bin/pip install --quiet --no-index"
        f" --find-links /srv/wheels /srv/releases/turnstile-{version}-py3-none-any.whl",
        seconds=300,
    )


def _config(machine: Machine, **values: str) -> None:
    script = "".join(f"s|^#\\?{name}=.*|{name}={value}|\n" for name, value in values.items())
    machine.run(f"sed -i -f - {CONFIG}", input=script)


def _tell(machine: Machine, arguments: str) -> str:
    return machine.out(f"{COMMAND} {arguments} 2>&1", seconds=120)


def _snapshot(machine: Machine) -> str:
    """Every file that it may touch, and what is enabled and runs."""
    return machine.out(
        "find /var/lib/turnstile/ /etc/turnstile /etc/systemd/system -name '*.pyc' -prune -o"
        " -printf '%p %s %T@ %l\\n' 2>/dev/null | sort;"
        " systemctl show --property=MainPID,ActiveState turnstile.service turnstile-ollama.socket",
        check=False,
    )


# -- the service -----------------------------------------------------------------------------------


def _service(report: Report, machine: Machine) -> bool:
    report.section("turnstile-service")

    def pip() -> str:
        _install(machine, FIRST)
        start_engines(machine, f"{USER}/bin/python")
        return machine.out(f"{USER}/bin/turnstile --version")

    def needs_root() -> str:
        done = machine.run(
            f"setpriv --reuid=65534 --regid=65534 --clear-groups {COMMAND} install 2>&1",
            check=False,
        )
        if not done.returncode or "root" not in done.stdout:
            raise Failed(f"{done.returncode}: {done.stdout}")
        return done.stdout.strip()

    def dry_run() -> str:
        before = _snapshot(machine)
        told = _tell(machine, "install --dry-run").splitlines()
        if _snapshot(machine) != before or not told or not all(line for line in told):
            raise Failed(f"{told}")
        return f"{len(told)} lines, nothing changed: {told[0]} …"

    def first() -> str:
        told = _tell(machine, "install").splitlines()
        if (
            machine.state() == "active"
            or is_open(OLLAMA)
            or not any("no engine" in line for line in told)
        ):
            raise Failed(f"{machine.state()}: {told}")
        machine.run(f"test -s {CONFIG} && systemctl cat turnstile.service >/dev/null")
        return told[-2] + " / " + told[-1]

    def second() -> str:
        _config(
            machine,
            OLLAMA_URL="http://127.0.0.1:11435",
            COMFY_URL="http://127.0.0.1:8189",
            LOGLEVEL="info",
        )
        _tell(machine, "install")
        version = expect(OLLAMA, "/api/version").json()
        expect(COMFY, "/system_stats")
        units = machine.out(
            "systemctl is-active turnstile.service turnstile-ollama.socket turnstile-comfy.socket"
        ).split()
        if units != ["active"] * 3:
            raise Failed(str(units))
        return f"service and both sockets are active, Ollama answers {version}"

    def idempotent() -> str:
        before = _snapshot(machine)
        told = _tell(machine, "install")
        if _snapshot(machine) != before:
            raise Failed(told)
        return told

    def drifted() -> str:
        before = machine.show("turnstile", "MainPID")
        machine.run("echo '# drifted' >> /etc/systemd/system/turnstile.service")
        pinger = Pinger(OLLAMA, "/api/version")
        told = _tell(machine, "install").splitlines()
        seen = pinger.stop()
        machine.run("! grep drifted /etc/systemd/system/turnstile.service")
        if machine.show("turnstile", "MainPID") == before or machine.state() != "active":
            raise Failed(f"not restarted: {told}")
        return f"{'; '.join(told)}; {seen}"

    def damaged() -> str:
        machine.run("rm /var/lib/turnstile/current/turnstile/card.py")
        told = _tell(machine, "install").splitlines()
        machine.run("test -s /var/lib/turnstile/current/turnstile/card.py")
        expect(OLLAMA, "/api/version")
        return "; ".join(told)

    def stopped() -> str:
        machine.run("systemctl stop turnstile-ollama.socket turnstile-comfy.socket turnstile")
        machine.run("echo '# drifted' >> /etc/systemd/system/turnstile.service")
        told = _tell(machine, "install").splitlines()
        if machine.state() != "inactive":
            raise Failed(f"{machine.state()}: {told}")
        machine.run("systemctl start turnstile-ollama.socket turnstile-comfy.socket turnstile")
        return told[-1]

    def kept() -> str:
        before = machine.out(f"sha256sum {CONFIG}")
        machine.write("/srv/other.env", "OLLAMA_URL=http://127.0.0.1:1\n")
        told = _tell(machine, "install --config /srv/other.env")
        if machine.out(f"sha256sum {CONFIG}") != before:
            raise Failed(f"it was changed: {told}")
        return f"install --config does not replace it ({told.splitlines()[-1]})"

    def sandboxed() -> str:
        told = machine.out("systemd-analyze security --no-pager turnstile.service | tail -1")
        shown = machine.show("turnstile", "DynamicUser", "Type", "WatchdogUSec")
        score = float(told.split(": ")[1].split()[0])
        if score > 1.5 or shown["DynamicUser"] != "yes" or shown["Type"] != "notify":
            raise Failed(f"{told}, {shown}")
        return f"{told.strip('→ ')}, {shown}"

    def status() -> str:
        told = _tell(machine, "status").splitlines()
        if not any("running" in line for line in told):
            raise Failed(str(told))
        return " / ".join(told)

    def no_copy() -> str:
        told = _tell(machine, "install --no-copy").splitlines()
        try:
            expect(OLLAMA, "/api/version")
            start = machine.out("systemctl show --property=ExecStart turnstile.service")
            if USER not in start:
                raise Failed(start)
        finally:
            _tell(machine, "install")
        if USER in machine.out("systemctl show --property=ExecStart turnstile.service"):
            raise Failed("it did not go back")
        expect(OLLAMA, "/api/version")
        return "; ".join(told)

    if not report.check("pip install, in an environment", pip):
        return False
    report.check("without root", needs_root)
    report.check("install --dry-run", dry_run)
    report.check("install, with no engine", first)
    if not report.check("install, with engines", second, machine.journal):
        return False
    report.check("install again changes nothing", idempotent)
    report.check("a unit that drifted, under load", drifted, machine.journal)
    report.check("a file that is missing", damaged, machine.journal)
    report.check("a service that was stopped stays so", stopped)
    report.check("the configuration", kept)
    report.check("the sandbox", sandboxed)
    report.check("status", status)
    report.check("install --no-copy, and back", no_copy, machine.journal)
    return True


# -- updates ---------------------------------------------------------------------------------------

#: A forge with the latest release of one repository, over TLS.
_FORGE = """
import http.server, json, os, ssl
FOLDER = "/srv/forge"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/api/v1/repos/somebody/turnstile/releases/latest":
            tag = open(FOLDER + "/latest").read().strip()
            names = [name for name in os.listdir(FOLDER) if name.startswith("turnstile-")]
            body = json.dumps({"tag_name": tag, "draft": False, "prerelease": False, "assets": [
                {"name": name, "size": os.path.getsize(f"{FOLDER}/{name}"),
                 "browser_download_url": f"https://localhost:8443/files/{name}"} for name in names]}).encode()
        elif self.path.startswith("/files/") and "/" not in self.path[7:]:
            body = open(f"{FOLDER}/{self.path[7:]}", "rb").read()
        else:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/run/forge.pem", "/run/forge.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def _start_forge(machine: Machine) -> None:
    machine.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost -keyout /run/forge.key -out /run/forge.pem 2>/dev/null"
        " && cp /run/forge.pem /usr/local/share/ca-certificates/forge.crt && update-ca-certificates >/dev/null 2>&1"
        " && mkdir -p /srv/forge"
    )
    machine.write("/run/forge.py", _FORGE)
    machine.run("systemd-run --quiet --collect --unit=forge python3 /run/forge.py")
    until(
        "the forge",
        lambda: (
            machine.run(
                "openssl s_client -connect 127.0.0.1:8443 </dev/null", check=False
            ).returncode
            == 0
        ),
    )


def _publish(machine: Machine, version: str, change: str = "") -> None:
    """Make a release the latest one; ``change``: a shell command, in its folder, with ``$wheel``."""
    wheel = f"turnstile-{version}-py3-none-any.whl"
    machine.run(
        f"rm -f /srv/forge/turnstile-* && cp /srv/releases/{wheel}* /srv/forge/ && cd /srv/forge"
        f" && wheel={wheel} && echo v{version} > latest; {change}"
    )


def _running(machine: Machine) -> str:
    """The version that answers."""
    text = expect(OLLAMA, "/turnstile/metrics").body.decode()
    line = next(line for line in text.splitlines() if line.startswith("gpu_turnstile_build_info{"))
    return line.split('version="')[1].split('"')[0]


def _updates(report: Report, machine: Machine) -> None:
    report.section("Signed updates")
    _start_forge(machine)
    _config(machine, UPDATE_REPO="https://localhost:8443/somebody/turnstile", UPDATE_INTERVAL="60s")

    def refused(why: str, change: str, version: str = SECOND) -> str:
        _publish(machine, version, change)
        done = machine.run(f"{COMMAND} update 2>&1", check=False, seconds=60)
        told = done.stdout.strip()
        if _running(machine) != FIRST or not told or len(told.splitlines()) > 1:
            raise Failed(f"{_running(machine)}, {done.returncode}: {told}")
        return told

    def by_itself() -> str:
        before = _running(machine)
        _publish(machine, SECOND)
        cursor = machine.cursor()
        machine.run("systemctl restart turnstile")
        pinger = Pinger(OLLAMA, "/api/version")
        until("the new version", lambda: _running(machine) == SECOND, 60.0, 0.5)
        seen = pinger.stop()
        journal = machine.journal(since=cursor)
        left = next((line for line in journal.splitlines() if "leaving for" in line), "")
        if not left or "Scheduled restart job" not in journal:
            raise Failed(f"it was not systemd that started it: {journal}")
        return f"{before} -> {SECOND}: {left.split(' ', 1)[1].strip()}; {seen}"

    def rolled_back() -> str:
        _publish(machine, "0.9.3")
        cursor = machine.cursor()
        # It stays only after it ran for a while.
        told = machine.run(f"{COMMAND} update 2>&1", check=False, seconds=90).stdout.strip()
        until(
            "the version before",
            lambda: machine.state() == "active" and _running(machine) == SECOND,
            90.0,
            0.5,
        )
        line = next(
            (
                line
                for line in machine.journal(since=cursor).splitlines()
                if "did not come up" in line
            ),
            "",
        )
        if not line:
            raise Failed(f"{told}; {machine.journal(since=cursor)}")
        return f"{told.splitlines()[-1] if told else ''} … {line}"

    def unusable() -> str:
        _publish(machine, "0.9.2")
        told = machine.run(f"{COMMAND} update 2>&1", check=False, seconds=90).stdout.strip()
        if _running(machine) != SECOND or "0.9.2" not in told:
            raise Failed(f"{_running(machine)}: {told}")
        return told

    def forced() -> str:
        _publish(machine, LAST)
        _config(machine, AUTO_UPDATE="false")
        off = machine.run(f"{COMMAND} update 2>&1", check=False, seconds=60).stdout.strip()
        if _running(machine) != SECOND:
            raise Failed(f"updated nevertheless: {off}")
        told = _tell(machine, "update --force").splitlines()
        until("the new version", lambda: _running(machine) == LAST, 60.0, 0.5)
        return f"without: {off}; with: {'; '.join(told)}"

    report.check("an unsigned release", lambda: refused("unsigned", "rm $wheel.sig"))
    report.check(
        "a tampered one",
        lambda: refused("tampered", "printf x >> $wheel; sha256sum $wheel > $wheel.sha256"),
    )
    report.check("a truncated one", lambda: refused("truncated", "truncate -s -100 $wheel"))
    report.check(
        "another release's wheel, replayed under a new tag",
        lambda: refused("replayed", "echo v0.9.9 > latest"),
    )
    report.check("the service updates itself", by_itself, machine.journal)
    report.check("a version that can't be imported is not installed", unusable)
    report.check("a version that does not come up is taken back", rolled_back, machine.journal)
    report.check("AUTO_UPDATE off, and update --force", forced, machine.journal)


def _removal(report: Report, machine: Machine) -> None:
    def removed() -> str:
        told = _tell(machine, "remove").splitlines()
        left = machine.out(
            "find /var/lib /etc/systemd /lib/systemd -name '*turnstile*'; ls /var/lib/private",
            check=False,
        )
        units = machine.out("systemctl list-units --all --no-legend 'turnstile*'")
        if left or units or is_open(OLLAMA) or is_open(COMFY):
            raise Failed(f"{left} {units}")
        machine.run(f"test -s {CONFIG}")
        return "; ".join(told)

    report.check("turnstile-service remove", removed)


# -- the container's image -------------------------------------------------------------------------


def dockerfile(report: Report, machine: Machine, sources: bytes, text: str) -> None:
    """The commands of the Dockerfile's layers, here, since no engine for containers is at hand."""
    report.section("The Dockerfile's commands")
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    of = lambda name: [line.split(None, 1)[1] for line in lines if line.split()[0] == name]  # noqa: E731

    def build() -> str:
        machine.run("ln -sf python3 /usr/bin/python; rm -rf /opt/turnstile; mkdir -p /src")
        machine.run(
            "base64 -d | tar --extract --directory /src", input=base64.b64encode(sources).decode()
        )
        (command,) = of("RUN")
        machine.run(
            "cd /src && export PIP_NO_INDEX=1 PIP_FIND_LINKS=/srv/wheels"
            f" SETUPTOOLS_SCM_PRETEND_VERSION=0.9.9; {command}",
            seconds=300,
        )
        return f"RUN exits 0; {machine.out('/opt/turnstile/bin/turnstile --version')}"

    def works() -> str:
        user = of("USER")[0].split(":")[0]
        entry = json.loads(of("ENTRYPOINT")[0])
        check = json.loads(of("HEALTHCHECK")[0].split("CMD ", 1)[1])
        environ = "OLLAMA_URL=http://127.0.0.1:11435 COMFY_URL=http://127.0.0.1:8189 PATH=/opt/turnstile/bin:$PATH"
        sick = machine.run(f"env {environ} {shlex.join(check)} 2>&1", check=False)
        machine.run(
            "systemd-run --quiet --unit=container --property=ProtectSystem=strict --property=ReadOnlyPaths=/"
            f" setpriv --reuid={user} --regid={user} --clear-groups --bounding-set=-all --inh-caps=-all"
            f" env {environ} {shlex.join(entry)}"
        )
        try:
            until(
                "a healthy container",
                lambda: (
                    machine.run(f"env {environ} {shlex.join(check)}", check=False).returncode == 0
                ),
            )
            expect(OLLAMA, "/api/version")
            expect(COMFY, "/system_stats")
        finally:
            machine.run("systemctl stop container")
        result = machine.journal("container").splitlines()[-1]
        if not sick.returncode:
            raise Failed("the health check passes with nothing running")
        return f"as user {user}, read-only: both ports answer ({result}); before: {sick.stdout.strip()}"

    if report.check("its RUN", build):
        report.check(
            "its ENTRYPOINT, USER and HEALTHCHECK", works, lambda: machine.journal("container")
        )
