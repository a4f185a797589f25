"""The service: how it starts, waits for connections, restarts, is watched over, and logs."""

import re
import threading
import time

from checks_package import SOCKETS, set_config
from http_client import COMFY, OLLAMA, Answer, Stream, ask, chat, expect
from machine import Failed, Machine, until
from report import Report

#: Short, so that a restart with a stream in flight leaves the requests that wait the rest of their ten seconds.
SHUTDOWN_TIMEOUT = 3
IMAGE = {
    "prompt": {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd.safetensors"}},
        "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "steps": 40, "seed": 1}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "sim"}},
    }
}


def start_engines(machine: Machine, python: str = "python3") -> None:
    """The simulated ones, in the container."""
    machine.run(
        f"systemd-run --quiet --collect --unit=engines {python} -m turnstile.sim"
        " --ollama-port 11435 --comfy-port 8189 --speed 2"
    )


def run(report: Report, machine: Machine) -> None:
    """All of them; the service is active, with both engines, before and after."""
    set_config(machine, SHUTDOWN_TIMEOUT=f"{SHUTDOWN_TIMEOUT}s")
    machine.run("systemctl restart turnstile")
    _notify(report, machine)
    _activation(report, machine)
    _restart(report, machine)
    _watchdog(report, machine)
    _reload(report, machine)
    _logs(report, machine)


def _pid(machine: Machine) -> int:
    return int(machine.show("turnstile", "MainPID")["MainPID"])


# -- notify ----------------------------------------------------------------------------------------

#: Plays systemd: runs turnstile and looks at its ports at the moment of each message.
_NOTIFIED = """
import os, signal, socket, subprocess, sys
def listens(port):
    rows = open("/proc/net/tcp").read().splitlines()[1:]
    return any(row.split()[1].endswith(":%04X" % port) and row.split()[3] == "0A" for row in rows)
ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ear.bind("/run/notified")
ear.settimeout(30)
child = subprocess.Popen(
    ["twistd3", "--nodaemon", "--pidfile=", "turnstile", "--ollama=http://127.0.0.1:11435", "--comfy=http://127.0.0.1:8189"],
    env={**os.environ, "NOTIFY_SOCKET": "/run/notified", "WATCHDOG_USEC": "300000"}, cwd="/tmp",
)
try:
    seen = []
    while len(seen) < 100 and "STOPPING=1" not in seen:
        for line in ear.recv(4096).decode().splitlines():
            name = line if line.split("=")[0] in ("READY", "STOPPING", "WATCHDOG") else line.split("=")[0]
            if name == "READY=1":
                name += f" ({'both' if listens(11434) and listens(8188) else 'not all'} ports open)"
            seen.append(name)
        if seen.count("WATCHDOG=1") == 3 and child.poll() is None:
            child.send_signal(signal.SIGTERM)
    print(" ".join(dict.fromkeys(seen)), "| exit", child.wait(20))
finally:
    child.kill()
    os.unlink("/run/notified")
"""


def _notify(report: Report, machine: Machine) -> None:
    report.section("sd_notify")

    def order() -> str:
        machine.run(f"systemctl stop {' '.join(SOCKETS)} turnstile")
        machine.write("/run/notified.py", _NOTIFIED)
        seen = machine.out("GPU_TURNSTILE_CONFIG= python3 /run/notified.py 2>/dev/null")
        ready = seen.find("READY=1 (both ports open)")
        if ready < 0 or not ready < seen.find("STOPPING=1") or not seen.endswith("| exit 0"):
            raise Failed(seen)
        return seen

    def start_waits() -> str:
        machine.run("systemctl start turnstile")
        for port in (OLLAMA, COMFY):
            expect(port, "/turnstile/healthz")
        shown = machine.show("turnstile", "Type", "WatchdogUSec", "StatusText")
        if shown["Type"] != "notify" or shown["WatchdogUSec"] != "30s":
            raise Failed(str(shown))
        return f"without the sockets, both ports answer when systemctl start returns; {shown}"

    def taken_port() -> str:
        machine.run("systemctl stop turnstile")
        machine.run("systemd-run --quiet --collect --unit=squatter python3 -m http.server 11434")
        until(
            "the squatter",
            lambda: (
                machine.run(
                    "ss --version >/dev/null 2>&1; grep -q ':2CAA .* 0A ' /proc/net/tcp",
                    check=False,
                ).returncode
                == 0
            ),
        )
        cursor = machine.cursor()
        try:
            failed = machine.run("systemctl start turnstile", check=False)
            journal = machine.journal(since=cursor)
        finally:
            machine.run(
                "systemctl stop squatter turnstile; systemctl reset-failed turnstile", check=False
            )
        reason = next(
            (line for line in journal.splitlines() if "11434" in line and "cannot" in line), ""
        )
        if not failed.returncode or not reason or "Started turnstile" in journal:
            raise Failed(f"{failed.returncode}: {journal}")
        return f"never ready: {reason}"

    def status() -> str:
        machine.run(f"systemctl start {' '.join(SOCKETS)} turnstile")
        seen = {}

        def text() -> str:
            return machine.show("turnstile", "StatusText")["StatusText"]

        stream = Stream(400)
        seen["a chat"] = until(
            "llm in the status line", lambda: (t := text()).startswith("llm") and t
        )
        stream.end()
        expect(COMFY, "/prompt", body=IMAGE)
        seen["a job"] = until(
            "image in the status line", lambda: (t := text()).startswith("image") and t
        )
        seen["after it"] = until(
            "idle in the status line", lambda: (t := text()).startswith("idle") and t
        )
        if seen["after it"] not in machine.out("systemctl status turnstile", check=False):
            raise Failed("systemctl status does not show it")
        return ", ".join(f"{when}: {line!r}" for when, line in seen.items())

    report.check("the order of its messages", order, machine.journal)
    report.check("systemctl start waits for the listeners", start_waits, machine.journal)
    report.check("a port that is taken", taken_port)
    report.check("systemctl status shows the card", status, machine.journal)


# -- socket activation -----------------------------------------------------------------------------


def _activation(report: Report, machine: Machine) -> None:
    report.section("Socket activation")

    def activated(port: int, target: str) -> str:
        machine.run("systemctl stop turnstile")
        if machine.state() != "inactive":
            raise Failed(f"the service is {machine.state()}")
        answer = expect(port, target)
        if machine.state() != "active":
            raise Failed(f"the service is {machine.state()}")
        return f"200 after {answer.seconds:.1f} s, the service is active"

    def burst() -> str:
        machine.run("systemctl stop turnstile")
        answers = _many(100, over=0.0)
        return _judge(answers, within=20.0)

    report.check(
        "stopped, a request to Ollama's port starts it",
        lambda: activated(OLLAMA, "/api/version"),
        machine.journal,
    )
    report.check(
        "stopped, a request to ComfyUI's port starts it",
        lambda: activated(COMFY, "/system_stats"),
        machine.journal,
    )
    report.check("stopped, 100 requests at once", burst, machine.journal)


_REQUESTS = (
    (OLLAMA, "/api/version", None),
    (COMFY, "/system_stats", None),
    (OLLAMA, "/api/generate", chat(2)),
    (OLLAMA, "/api/tags", None),
)


def _many(count: int, over: float) -> "list[Answer | OSError]":
    """So many requests of several kinds, each on a connection of its own, spread over so many seconds."""
    answers: list[Answer | OSError] = []

    def one(number: int) -> None:
        port, target, body = _REQUESTS[number % len(_REQUESTS)]
        try:
            answers.append(ask(port, target, body, seconds=30.0))
        except OSError as error:
            answers.append(error)

    threads = []
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + over * number / count - time.monotonic()))
        thread = threading.Thread(target=one, args=(number,), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(60)
    return answers


def _judge(answers: "list[Answer | OSError]", within: float) -> str:
    bad = [
        f"{answer.status} {answer.body[:80]!r}" if isinstance(answer, Answer) else repr(answer)
        for answer in answers
        if not (isinstance(answer, Answer) and answer.status == 200)
    ]
    times = [answer.seconds for answer in answers if isinstance(answer, Answer)]
    slow = [seconds for seconds in times if seconds > within]
    if bad or slow:
        raise Failed(
            f"{len(bad)} of {len(answers)} not 200: {bad[:4]}; {len(slow)} slower than {within:.0f} s"
        )
    return f"{len(answers)} answered 200, the slowest after {max(times):.1f} s"


# -- restart ---------------------------------------------------------------------------------------


def _restart(report: Report, machine: Machine) -> None:
    report.section("Restarted under load")

    def restart(tokens: int, expected: str) -> str:
        before = _pid(machine)
        stream = Stream(tokens)
        stream.wait_for_first()
        result: list[list[Answer | OSError]] = []
        load = threading.Thread(target=lambda: result.append(_many(200, over=5.0)), daemon=True)
        load.start()
        time.sleep(0.3)
        began = time.monotonic()
        machine.run("systemctl restart turnstile")
        took = time.monotonic() - began
        load.join(90)
        outcome = stream.end()
        lasted = stream.ended_at - began
        told = _judge(result[0], within=10.0)
        if outcome != expected or _pid(machine) == before or lasted > SHUTDOWN_TIMEOUT + 2:
            raise Failed(f"the stream was {outcome} after {lasted:.1f} s; {told}")
        return f"{told}; a stream in flight was {outcome} after {lasted:.1f} s; the restart took {took:.1f} s"

    report.check(
        "200 requests during systemctl restart, a stream that is longer than SHUTDOWN_TIMEOUT",
        lambda: restart(3000, "cut"),
        machine.journal,
    )
    report.check(
        "200 requests during systemctl restart, a stream that ends in time",
        lambda: restart(150, "whole"),
        machine.journal,
    )


# -- watchdog --------------------------------------------------------------------------------------

_DROP_IN = "/run/systemd/system/turnstile.service.d/test.conf"
#: twistd, with a reactor that stands still after a while.
_WEDGED = (
    "import time; from twisted.internet import reactor; from twisted.scripts.twistd import run; "
    "reactor.callLater(4, time.sleep, 600); run()"
)


def _drop_in(machine: Machine, *lines: str) -> None:
    machine.write(_DROP_IN, "\n".join(["[Service]", *lines, ""]))
    machine.run("systemctl daemon-reload && systemctl restart turnstile")


def _watchdog(report: Report, machine: Machine) -> None:
    report.section("Watchdog (of 3 s instead of 30 s)")

    def recovers(how: str) -> str:
        before, cursor = _pid(machine), machine.cursor()
        began = time.monotonic()
        if how == "stop":
            machine.run(f"kill -STOP {before}")
        waiting: list[Answer | OSError] = []
        thread = threading.Thread(target=lambda: waiting.extend(_many(1, over=0.0)), daemon=True)

        def killed() -> bool:
            return "watchdog" in machine.journal(since=cursor).lower()

        until("the watchdog's timeout in the journal", killed, 30.0)
        after = time.monotonic() - began
        thread.start()
        until(
            "another process",
            lambda: _pid(machine) not in (0, before) and machine.state() == "active",
            30.0,
        )
        recovered = time.monotonic() - began
        thread.join(30)
        told = _judge(waiting, within=20.0)
        return f"ended after {after:.1f} s, active again after {recovered:.1f} s; a request in between: {told}"

    def stopped() -> str:
        _drop_in(machine, "WatchdogSec=3")
        return recovers("stop")

    def wedged() -> str:
        _drop_in(
            machine,
            "WatchdogSec=3",
            "ExecStart=",
            f'ExecStart=/usr/bin/python3 -c "{_WEDGED}" --nodaemon --pidfile= turnstile',
        )
        return recovers("wedge")

    try:
        report.check("a process that is stopped (SIGSTOP)", stopped, machine.journal)
        report.check("a reactor that stands still", wedged, machine.journal)
    finally:
        machine.run(f"rm -f {_DROP_IN} && systemctl daemon-reload && systemctl restart turnstile")
        machine.run("systemctl reset-failed turnstile", check=False)


# -- SIGHUP and logs -------------------------------------------------------------------------------

_READ_AGAIN = re.compile(r"(INFO|WARN|ERROR) +(setting [A-Z_]+: |the configuration )")


def _reload_config(machine: Machine) -> str:
    """Reload, and wait until the journal tells of it; what it tells."""
    cursor = machine.cursor()
    machine.run("systemctl reload turnstile")
    told = until(
        "a line about the reload", lambda: _READ_AGAIN.search(machine.journal(since=cursor))
    )
    return str(machine.journal(since=cursor)[told.start() :].splitlines()[0])


def _reload(report: Report, machine: Machine) -> None:
    report.section("SIGHUP")

    def lines(cursor: str) -> int:
        return machine.journal(since=cursor).count("/api/version")

    def level() -> str:
        before = _pid(machine)
        counts = []
        for value in ("warn", "info"):
            set_config(machine, LOGLEVEL=value)
            _reload_config(machine)
            cursor = machine.cursor()
            expect(OLLAMA, "/api/version")
            time.sleep(0.3)
            counts.append(lines(cursor))
        if counts[0] or not counts[1] or _pid(machine) != before or machine.state() != "active":
            raise Failed(f"{counts} lines of a request, process {before} -> {_pid(machine)}")
        return f"a request makes {counts[0]} lines with LOGLEVEL=warn, {counts[1]} with info; same process"

    def limit() -> str:
        set_config(machine, LLM_BUSY_MODE="reject", LLM_BUSY_STATUS="429")
        _reload_config(machine)
        try:
            expect(COMFY, "/prompt", body=IMAGE)
            answer = expect(OLLAMA, "/api/generate", 429, chat(1))
        finally:
            set_config(machine, LLM_BUSY_MODE="", LLM_BUSY_STATUS="")
            _reload_config(machine)
        return f"LLM_BUSY_MODE=reject, LLM_BUSY_STATUS=429: {answer.status} during a job"

    def mistake() -> str:
        before = _pid(machine)
        set_config(machine, UNLOAD_TIMEOUT="soon")
        try:
            told = _reload_config(machine)
            expect(OLLAMA, "/api/version")
        finally:
            set_config(machine, UNLOAD_TIMEOUT="")
            _reload_config(machine)
        if "UNLOAD_TIMEOUT" not in told or _pid(machine) != before:
            raise Failed(told)
        return told

    report.check("the log level", level, machine.journal)
    report.check("how a busy card answers", limit, machine.journal)
    report.check("a file with a mistake changes nothing", mistake, machine.journal)


def _logs(report: Report, machine: Machine) -> None:
    report.section("Logs")
    path = "/var/log/turnstile/turnstile.log"

    def journal() -> str:
        cursor = machine.cursor()
        expect(OLLAMA, "/api/tags")
        found = until(
            "the request in the journal",
            lambda: [
                line for line in machine.journal(since=cursor).splitlines() if "/api/tags" in line
            ],
            5.0,
        )
        identifier = machine.out(
            "journalctl --no-pager --lines=1 --output=verbose --unit=turnstile --identifier=turnstile"
            " | grep -c SYSLOG_IDENTIFIER=turnstile"
        )
        if identifier != "1":
            raise Failed("the journal does not name it turnstile")
        return found[0]

    def file() -> str:
        set_config(machine, LOG_FILE=path)
        machine.run("systemctl reload turnstile")
        cursor = machine.cursor()
        expect(OLLAMA, "/api/tags")
        found = until(
            "the request in the file",
            lambda: machine.out(f"grep -c /api/tags {path}", check=False),
            5.0,
        )
        if "/api/tags" in machine.journal(since=cursor):
            raise Failed("the journal has it as well")
        owner = machine.out(f"stat --dereference --format='%a, uid %u' {path}")
        return f"{found} lines of a request in {path} ({owner})"

    def rotated() -> str:
        machine.run("logrotate --force /etc/logrotate.d/turnstile")
        expect(OLLAMA, "/api/ps")
        until(
            "the request in the new file",
            lambda: machine.out(f"grep /api/ps {path}", check=False),
            5.0,
        )
        if machine.out(f"grep -c /api/ps {path}.1", check=False) != "0":
            raise Failed("the old file still grows")
        return machine.out("ls /var/log/turnstile").replace("\n", " ")

    def back() -> str:
        set_config(machine, LOG_FILE="")
        _reload_config(machine)
        return journal()

    report.check("the journal has each request", journal, machine.journal)
    report.check("LOG_FILE", file, machine.journal)
    report.check("logrotate", rotated, lambda: machine.out(f"tail {path}"))
    report.check("back to the journal", back, machine.journal)
