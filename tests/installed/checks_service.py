"""The service: started, stopped, restarted, watched over."""

from machine import Machine
from report import Report


def run(report: Report, machine: Machine) -> None:
    report.section("The service")
