"""The sandbox: what the service can't do, and what the drop-ins open."""

import re

from checks_package import set_config
from http_client import COMFY, OLLAMA, expect
from machine import Failed, Machine, until
from report import Report

BEST = 1.5
DROP_INS = "/usr/share/turnstile/drop-ins"
_PLACE = "/run/systemd/system/turnstile.service.d"


def run(report: Report, machine: Machine) -> None:
    """All of them; the service is active, with both engines, before and after."""
    report.section("Sandbox")

    def score() -> str:
        told = machine.out("systemd-analyze security --no-pager turnstile.service")
        match = re.search(r"Overall exposure level for turnstile.service: ([0-9.]+) (\w+)", told)
        if match is None or float(match[1]) > BEST:
            raise Failed(match[0] if match else told)
        return match[0]

    def process() -> str:
        pid = machine.show("turnstile", "MainPID")["MainPID"]
        status = dict(
            line.split(":\t", 1)
            for line in machine.out(f"cat /proc/{pid}/status").splitlines()
            if ":\t" in line
        )
        uid = status["Uid"].split()[0]
        known = machine.run("grep -c turnstile /etc/passwd /etc/group", check=False).stdout.split()
        facts = {name: status[name] for name in ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp")}
        if (
            int(status["CapBnd"], 16)
            or int(status["CapEff"], 16)
            or status["NoNewPrivs"] != "1"
            or status["Seccomp"] != "2"
        ):
            raise Failed(str(facts))
        if not 61184 <= int(uid) <= 65519 or known != ["/etc/passwd:0", "/etc/group:0"]:
            raise Failed(f"user {uid}, {known}")
        return f"user {uid} of systemd's making, {facts}"

    def writes() -> str:
        pid = machine.show("turnstile", "MainPID")["MainPID"]
        uid = machine.out(f"stat --format=%u /proc/{pid}")
        # With its user, in its mount name space: every folder, and every file, that it could write to.
        found = machine.out(
            f"nsenter --target={pid} --mount setpriv --reuid={uid} --regid={uid} --clear-groups --no-new-privs "
            "--inh-caps=-all --bounding-set=-all "
            "find / \\( -path /proc -o -path /sys/fs/cgroup \\) -prune -o ! -type l -writable -print 2>/dev/null",
            check=False,
        ).splitlines()
        own = [
            path
            for path in found
            if re.match(r"/(var/lib/private|var/log/private|run)/turnstile(/|$)", path)
        ]
        private = [
            path for path in found if re.match(r"/(tmp|var/tmp|dev/shm|dev/mqueue)(/|$)", path)
        ]
        devices = [
            path
            for path in found
            if re.fullmatch(r"/dev/(null|zero|full|random|urandom|tty|ptmx|pts/ptmx)", path)
        ]
        sockets = [
            path
            for path in found
            if machine.run(
                f"nsenter --target={pid} --mount test -S '{path}'", check=False
            ).returncode
            == 0
        ]
        other = sorted(set(found) - {*own, *private, *devices, *sockets})
        if other or "/var/lib/private/turnstile" not in own:
            raise Failed(f"it can write to {other}; {own}")
        machine.run(
            f"nsenter --target={pid} --mount touch /tmp/theirs /var/tmp/theirs /dev/shm/theirs"
        )
        if machine.run("ls /tmp/theirs /var/tmp/theirs /dev/shm/theirs", check=False).stdout:
            raise Failed("its temporary folders are the system's")
        folders = ", ".join(sorted(path for path in own if path.endswith("turnstile")))
        return (
            f"{folders} of its own, a private {', '.join(sorted(private))}, {len(sockets)} sockets"
        )

    def tls() -> str:
        _start_tls_engine(machine)
        set_config(
            machine, OLLAMA_URL="https://localhost:11445", UPSTREAM_CA="/etc/turnstile/ca.pem"
        )
        machine.run("systemctl restart turnstile")
        try:
            told = expect(OLLAMA, "/api/version").json()
            machine.run(
                f"mkdir -p {_PLACE} && ln -s {DROP_INS}/no-tls.conf {_PLACE}/ && systemctl daemon-reload"
            )
            forbidden = machine.run("systemctl restart turnstile", check=False).returncode
        finally:
            set_config(machine, OLLAMA_URL="http://127.0.0.1:11435", UPSTREAM_CA="")
            machine.run(
                f"rm -f {_PLACE}/no-tls.conf /etc/turnstile/ca.pem; systemctl stop tls-engine"
            )
            machine.run("systemctl daemon-reload; systemctl restart turnstile")
        if told != {"version": "tls"}:
            raise Failed(f"{told}")
        start = "does not start" if forbidden else "would start, too"
        return f"verified by UPSTREAM_CA, it answers {told} (with no-tls.conf turnstile {start})"

    report.check("systemd-analyze security", score)
    report.check("its process", process)
    report.check("what it can write to", writes)
    report.check("an https engine", tls, machine.journal)
    _drop_ins(report, machine)


_TLS_ENGINE = """
import http.server, ssl
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = b'{"models": []}' if self.path == "/api/ps" else b'{"version": "tls"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 11445), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/run/tls.pem", "/run/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def _start_tls_engine(machine: Machine) -> None:
    machine.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost -keyout /run/tls.key -out /run/tls.pem 2>/dev/null"
        " && cp /run/tls.pem /etc/turnstile/ca.pem"
    )
    machine.write("/run/tls_engine.py", _TLS_ENGINE)
    machine.run("systemd-run --quiet --collect --unit=tls-engine python3 /run/tls_engine.py")
    until(
        "the https engine",
        lambda: (
            machine.run(
                "openssl s_client -connect 127.0.0.1:11445 </dev/null", check=False
            ).returncode
            == 0
        ),
    )


def _drop_ins(report: Report, machine: Machine) -> None:
    # What a machine with a graphics card has.
    machine.run("touch /dev/nvidiactl; getent group render || groupadd --system render")

    def with_(name: str) -> str:
        machine.run(
            f"mkdir -p {_PLACE} && ln -sf {DROP_INS}/{name} {_PLACE}/"
            " && systemctl daemon-reload && systemctl restart turnstile"
        )
        expect(OLLAMA, "/api/version")
        expect(COMFY, "/system_stats")
        return machine.show("turnstile", "MainPID")["MainPID"]

    def sees_card(pid: str) -> bool:
        return machine.run(f"test -e /proc/{pid}/root/dev/nvidiactl", check=False).returncode == 0

    def gpu() -> str:
        if sees_card(machine.show("turnstile", "MainPID")["MainPID"]):
            raise Failed("the card is visible without the drop-in")
        if not sees_card(with_("gpu.conf")):
            raise Failed("the card is not visible with the drop-in")
        return "with it the service sees /dev/nvidiactl, without it does not"

    def children() -> str:
        pid = with_("children.conf")
        groups = machine.out(f"grep Groups: /proc/{pid}/status").split()[1:]
        wanted = machine.out("getent group video render | cut -d: -f3").split()
        # What a GPU's driver does: memory that is writable and executable.
        if not sees_card(pid) or not set(wanted) <= set(groups):
            raise Failed(f"groups {groups}, wanted {wanted}")
        return f"groups {' '.join(groups)}, the card is visible"

    def no_tls() -> str:
        with_("no-tls.conf")
        shown = machine.show("turnstile", "MemoryDenyWriteExecute")
        if shown != {"MemoryDenyWriteExecute": "yes"}:
            raise Failed(str(shown))
        return f"runs with {shown}"

    def peers() -> str:
        machine.run(
            "useradd --system --user-group --no-create-home --shell /usr/sbin/nologin turnstile"
        )
        pid = with_("peers.conf")
        machine.run("touch /dev/shm/shared")
        if machine.run(f"test -e /proc/{pid}/root/dev/shm/shared", check=False).returncode:
            raise Failed("/dev/shm is not the system's")
        return f"user {machine.out(f'stat --format=%U /proc/{pid}')}, /dev/shm is the system's"

    def log_dir() -> str:
        machine.run("install -d -m 2770 -g adm /srv/log")
        set_config(machine, LOG_FILE="/srv/log/turnstile.log")
        with_("log-dir.conf")
        size = until(
            "something in the log",
            lambda: machine.out("grep -c . /srv/log/turnstile.log", check=False),
            5.0,
        )
        return f"{size} lines in /srv/log/turnstile.log"

    for name, look in (
        ("gpu", gpu),
        ("children", children),
        ("no-tls", no_tls),
        ("peers", peers),
        ("log-dir", log_dir),
    ):
        report.check(f"drop-in {name}.conf", look, machine.journal)
        set_config(machine, LOG_FILE="")
        machine.run(f"rm -f {_PLACE}/*.conf; systemctl daemon-reload; systemctl restart turnstile")
        machine.run(
            "! getent passwd turnstile >/dev/null || ! grep -q ^turnstile: /etc/passwd || userdel turnstile",
            check=False,
        )
    machine.run("rm -rf /dev/nvidiactl /dev/shm/shared /srv/log")
