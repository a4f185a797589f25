"""The package: how it is built, installed, upgraded, removed."""

import re

from build import Workshop
from machine import Failed, Machine
from report import Report

OLDER = "0.0.1"


def build(report: Report, workshop: Workshop, version: str) -> tuple[bytes, bytes] | None:
    """An older and a newer package, if they can be built."""
    report.section("The package is built")
    debs: dict[str, bytes] = {}

    def newer() -> str:
        workshop.unpack("newer")
        debs["newer"] = workshop.build("newer", version)
        return workshop.run("dpkg-deb --field /srv/newer.out/*.deb Package Version Architecture").stdout.replace("\n", " ").strip()  # fmt: skip

    def older() -> str:
        folder = workshop.unpack("older")
        # So that the configuration file that it ships is another one.
        reference = folder / "turnstile/reference.py"
        text = reference.read_text()
        reference.write_text(text.replace("turnstile's configuration.", "An older configuration."))
        if reference.read_text() == text:
            raise Failed("there is nothing to change in turnstile/reference.py")
        debs["older"] = workshop.build("older", OLDER)
        return workshop.run("dpkg-deb --field /srv/older.out/*.deb Version").stdout.strip()

    def depends() -> str:
        names = workshop.run("dpkg-deb --field /srv/newer.out/*.deb Depends").stdout
        for name in "twisted treq autobahn service-identity prometheus-client attr".split():
            if f"python3-{name}" not in names:
                raise Failed(f"python3-{name} is missing in {names}")
        return names.strip()

    def lintian() -> str:
        done = workshop.run("lintian --fail-on error,warning,info --info --display-info /srv/newer.out/*.changes")  # fmt: skip
        overridden = len(re.findall(r"(?m)^O:", done.stdout))
        return f"no errors, warnings or notes, {overridden} overridden"

    if not (report.check("dpkg-buildpackage", newer) and report.check("an older one", older)):
        return None
    report.check("it depends on Debian's packages", depends)
    report.check("lintian", lintian)
    return debs["older"], debs["newer"]


def install(report: Report, machine: Machine, newer_version: str) -> None:
    """Install the older one; no engine is configured."""
    report.section("Installed, with no engine configured")
    seen = []

    def apt() -> str:
        seen.append(machine.run("apt-get install --yes /srv/older.deb 2>&1", seconds=300).stdout)
        match = re.search(r"(\d+) newly installed", seen[0])
        return f"{match[1] if match else '?'} packages, from Debian's archive"

    def off() -> str:
        told = [line for line in seen[0].splitlines() if "turnstile is installed" in line or "dpkg-reconfigure" in line]  # fmt: skip
        if machine.state() != "inactive" or len(told) != 2:
            raise Failed(f"{machine.state()}, {told}")
        return " / ".join(told)

    if report.check("apt", apt):
        report.check("the service is off, and apt says why", off)
