"""The package: how it is built, installed, configured, upgraded, removed."""

import re
import time

from build import Workshop
from http_client import COMFY, OLLAMA, Pinger, expect, is_open
from machine import Failed, Machine, until
from report import Report

OLDER = "0.0.1"
CONFIG = "/etc/turnstile/turnstile.env"
SOCKETS = ("turnstile-ollama.socket", "turnstile-comfy.socket")


def build(report: Report, workshop: Workshop, version: str) -> dict[str, bytes] | None:
    """An older and a newer package, if they can be built."""
    report.section("The package is built")
    debs: dict[str, bytes] = {}

    def newer() -> str:
        workshop.unpack("newer")
        debs["newer.deb"] = workshop.build("newer", version)
        told = workshop.run(
            "dpkg-deb --show --showformat '${Version} ${Architecture}' /srv/newer.out/*.deb"
        ).stdout
        if told.replace("~", ".") != f"{version} all":
            raise Failed(f"{told}, and git says {version}")
        return f"{told}, of git's {version}"

    def older() -> str:
        folder = workshop.unpack("older")
        # So that the configuration file that it ships is another one.
        reference = folder / "turnstile/reference.py"
        text = reference.read_text()
        reference.write_text(text.replace("turnstile's configuration.", "An older configuration."))
        if reference.read_text() == text:
            raise Failed("there is nothing to change in turnstile/reference.py")
        debs["older.deb"] = workshop.build("older", OLDER)
        return workshop.run("dpkg-deb --field /srv/older.out/*.deb Version").stdout.strip()

    def depends() -> str:
        names = workshop.run("dpkg-deb --field /srv/newer.out/*.deb Depends").stdout
        for name in "twisted treq autobahn service-identity prometheus-client attr".split():
            if f"python3-{name}" not in names:
                raise Failed(f"python3-{name} is missing in {names}")
        return names.strip()

    def lintian() -> str:
        told = workshop.run(
            "lintian --fail-on none --allow-root --display-info --show-overrides /srv/newer.out/*.deb"
        ).stdout
        if tags := re.findall(r"(?m)^[EWI]: .*", told):
            raise Failed(" / ".join(tags))
        overridden = re.findall(r"(?m)^O: \S+ (\S+)", told)
        return f"no error, warning or note; overridden: {', '.join(overridden) or 'none'}"

    if not (report.check("dpkg-buildpackage", newer) and report.check("an older one", older)):
        return None
    report.check("it depends on Debian's packages", depends)
    report.check("lintian", lintian)
    return debs


def install(report: Report, machine: Machine) -> bool:
    """Install the older one; no engine is configured. Whether it is there."""
    report.section("Installed, with no engine configured")
    output = []

    def apt() -> str:
        output.append(machine.run("apt-get install --yes /srv/older.deb 2>&1", seconds=400).stdout)
        match = re.search(r"(\d+) newly installed", output[0])
        return f"{match[1] if match else '?'} packages, those of Debian's archive and ours"

    def off() -> str:
        told = [
            line
            for line in output[0].splitlines()
            if "turnstile is installed" in line or "dpkg-reconfigure" in line
        ]
        states = {unit: machine.state(unit) for unit in ("turnstile.service", *SOCKETS)}
        if set(states.values()) != {"inactive"} or len(told) != 2 or is_open(OLLAMA):
            raise Failed(f"{states}, {told}")
        return " / ".join(told)

    def refuses() -> str:
        failed = machine.run("systemctl start turnstile", check=False)
        reason = next((line for line in machine.journal().splitlines() if "no engine" in line), "")
        shown = machine.show("turnstile", "ActiveState", "NRestarts", "ExecMainStatus")
        if (
            not failed.returncode
            or not reason
            or shown != {"ActiveState": "failed", "NRestarts": "0", "ExecMainStatus": "2"}
        ):
            raise Failed(f"{failed.returncode}, {shown}: {machine.journal()}")
        machine.run("systemctl reset-failed turnstile")
        return f"exit status 2, not tried again: {reason}"

    def plugin() -> str:
        told = machine.run(
            "setpriv --reuid=65534 --regid=65534 --clear-groups twistd3 turnstile --version 2>&1; "
            "unshare --mount sh -c 'mount -o remount,bind,ro / && twistd3 turnstile --version 2>&1'"
        ).stdout
        cached = machine.run(
            "cd /usr/lib/python3/dist-packages/twisted/plugins; grep -c turnstile dropin.cache; "
            "find . -name 'turnstile*.py' -newer dropin.cache"
        ).stdout
        if told != f"turnstile {OLDER}\n" * 2 or not cached.strip().isdecimal():
            raise Failed(f"{told!r}, {cached!r}")
        return f"{told.splitlines()[0]}, for nobody and on a read-only system; in Twisted's plugin cache"

    def texts() -> str:
        machine.run(
            "test -s /usr/share/man/man8/turnstile.8.gz -a -s /usr/share/man/man5/turnstile.env.5.gz"
        )
        words = machine.out(
            "bash -ec 'source /usr/share/bash-completion/completions/turnstile; "
            'COMP_WORDS=(turnstile --llm-busy-mode ""); COMP_CWORD=2; _turnstile; echo "${COMPREPLY[*]}"; '
            'COMP_WORDS=(turnstile --oll); COMP_CWORD=1; _turnstile; echo "${COMPREPLY[*]}"\''
        ).splitlines()
        if words != ["wait reject", "--ollama"]:
            raise Failed(f"bash completes {words}")
        return "two manual pages; bash completes --llm-busy-mode <TAB> to: wait reject"

    if not report.check("apt", apt, lambda: output[0] if output else ""):
        return False
    report.check("the service is off, and apt says why", off)
    report.check("started all the same, it says what is missing", refuses)
    report.check("twistd finds the plugin", plugin)
    report.check("manual pages and completion", texts)
    return True


def configure(report: Report, machine: Machine) -> None:
    """Name engines, one after the other."""
    report.section("Engines are configured")

    def only_ollama() -> str:
        set_config(machine, OLLAMA_URL="http://127.0.0.1:11435", LOGLEVEL="info")
        machine.run("dpkg-reconfigure turnstile")
        states = [machine.state(unit) for unit in ("turnstile.service", *SOCKETS)]
        if states != ["active", "active", "inactive"] or is_open(COMFY):
            raise Failed(f"{states}, port {COMFY} is {'open' if is_open(COMFY) else 'closed'}")
        version = expect(OLLAMA, "/api/version").json()
        return f"service and {SOCKETS[0]} are active, {SOCKETS[1]} is not; Ollama answers {version}"

    def socket_without_engine() -> str:
        machine.run(f"systemctl stop turnstile && systemctl start {SOCKETS[1]} turnstile")
        try:
            answer = expect(COMFY, "/system_stats", 503)
            expect(OLLAMA, "/api/version")
        finally:
            machine.run(f"systemctl stop {SOCKETS[1]}; systemctl restart turnstile")
        return answer.body.decode()[:160]

    def both() -> str:
        set_config(machine, COMFY_URL="http://127.0.0.1:8189")
        machine.run("dpkg-reconfigure turnstile")
        states = [machine.state(unit) for unit in ("turnstile.service", *SOCKETS)]
        enabled = machine.out(f"systemctl is-enabled turnstile.service {' '.join(SOCKETS)}").split()
        if states != ["active"] * 3 or enabled != ["enabled"] * 3:
            raise Failed(f"{states}, {enabled}")
        expect(OLLAMA, "/api/version")
        device = expect(COMFY, "/system_stats").json()["devices"][0]["type"]
        return f"both sockets and the service are enabled and active; ComfyUI has a {device} device"

    def repaired() -> str:
        set_config(machine, UNLOAD_TIMEOUT="soon")
        machine.run("systemctl restart turnstile", check=False)
        # Who connects has it started again, until systemd gives up.
        until("an end of the attempts", lambda: not is_open(OLLAMA) and not is_open(COMFY), 60.0)
        told = machine.out("dpkg-reconfigure turnstile 2>&1").splitlines()
        set_config(machine, UNLOAD_TIMEOUT="")
        machine.run("dpkg-reconfigure turnstile")
        states = [machine.state(unit) for unit in ("turnstile.service", *SOCKETS)]
        if states != ["active"] * 3 or not told or "UNLOAD_TIMEOUT" not in told[0]:
            raise Failed(f"{states}, {told}")
        expect(OLLAMA, "/api/version")
        return f"{told[0]}; corrected, all of it runs again"

    report.check("dpkg-reconfigure, with Ollama alone", only_ollama, machine.journal)
    report.check("a socket without an engine answers 503", socket_without_engine, machine.journal)
    report.check("dpkg-reconfigure, with both", both, machine.journal)
    report.check("dpkg-reconfigure, after a mistake in the file", repaired, machine.journal)


def set_config(machine: Machine, **values: str) -> None:
    """Uncomment settings, as a person would; None comments one out again."""
    script = "".join(
        f"s|^#\\?{name}=.*|{name}={value}|\n" if value else f"s|^#\\?{name}=.*|#{name}=|\n"
        for name, value in values.items()
    )
    machine.run(f"sed -i -f - {CONFIG}", input=script)


def upgrade(report: Report, machine: Machine) -> None:
    """To the newer one, under load."""
    report.section("Upgraded")
    before = machine.out(f"cat {CONFIG}")
    cursor = machine.cursor()

    def apt() -> str:
        pinger = Pinger(OLLAMA, "/api/version")
        output = machine.run(
            "apt-get install --yes -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "
            "/srv/newer.deb 2>&1",
            seconds=400,
        ).stdout
        told = until(
            "the new version",
            lambda: machine.out("dpkg-query --show --showformat='${Version}' turnstile"),
        )
        time.sleep(0.5)
        if f"Setting up turnstile ({told})" not in output:
            raise Failed(output)
        return f"{OLDER} -> {told}; {pinger.stop()}"

    def configuration() -> str:
        after = machine.out(f"cat {CONFIG}")
        shipped = machine.out(f"head -1 {CONFIG}.dpkg-dist", check=False)
        if (
            after != before
            or "An older configuration" not in after
            or "turnstile's configuration" not in shipped
        ):
            raise Failed(f"{shipped!r}, changed: {after != before}")
        return "kept; the new file lies beside it as turnstile.env.dpkg-dist"

    def once() -> str:
        starts = [
            line
            for line in machine.journal(since=cursor).splitlines()
            if line.startswith("Started turnstile")
        ]
        version = machine.out("turnstile --version").split()[1]
        running = machine.journal(since=cursor).count(version)
        if len(starts) != 1 or not running:
            raise Failed(machine.journal(since=cursor))
        return f"one start in the journal, of {version}"

    report.check("apt, with requests under way", apt, machine.journal)
    report.check("the configuration", configuration)
    report.check("restarted once", once)


def remove(report: Report, machine: Machine) -> None:
    """Remove, install again, purge."""
    report.section("Removed")

    def removed() -> str:
        machine.run("apt-get remove --yes turnstile 2>&1", seconds=300)
        states = [machine.state(unit) for unit in ("turnstile.service", *SOCKETS)]
        if states != ["inactive"] * 3 or is_open(OLLAMA) or is_open(COMFY):
            raise Failed(f"{states}")
        machine.run(f"test -f {CONFIG}")
        if "turnstile" in machine.out("twistd3 --help 2>&1"):
            raise Failed("twistd still knows the plugin")
        return "service and sockets are gone, ports closed, the configuration is kept"

    def again() -> str:
        machine.run("apt-get install --yes /srv/newer.deb 2>&1", seconds=300)
        states = [machine.state(unit) for unit in ("turnstile.service", *SOCKETS)]
        if states != ["active"] * 3:
            raise Failed(f"{states}")
        expect(OLLAMA, "/api/version")
        return "all that was enabled runs again"

    def purged() -> str:
        # A log and a state file, as a used one has.
        machine.run("touch /var/log/private/turnstile/turnstile.log /var/lib/private/turnstile/x")
        machine.run("apt-get purge --yes turnstile 2>&1", seconds=300)
        left = machine.out(
            "find / -xdev \\( -path /proc -o -path /sys -o -path /srv -o -path /var/cache/apt"
            " -o -path /run/systemd/transient \\) -prune -o -iname '*turnstile*' -print"
        )
        units = machine.out(
            "systemctl list-unit-files --no-legend 'turnstile*'; systemctl list-units --all --no-legend 'turnstile*'"
        )
        if left or units:
            raise Failed(f"left: {left} {units}")
        return "find / -iname '*turnstile*' finds nothing, systemd knows no unit of that name"

    report.check("apt remove", removed)
    report.check("installed again", again, machine.journal)
    report.check("apt purge", purged)
