"""Shared by all tests: one that hangs ends the run, with every stack printed."""

import faulthandler
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# How fast the machine is says nothing about the program.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

HANG_LIMIT = 120.0


def pytest_configure(config):
    # A shell starts what runs in the background with these ignored, and children would inherit that.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    config.hang_report = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")


def pytest_unconfigure(config):
    faulthandler.cancel_dump_traceback_later()
    config.hang_report.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    marker = item.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else HANG_LIMIT
    # A hard exit: nothing softer works on a reactor that is stuck.
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.hang_report)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter):
    """Say how many cases ran against real engines, since those that are missing skip silently."""
    stats = terminalreporter.stats

    def reports(*outcomes):
        found = [report for outcome in outcomes for report in stats.get(outcome, ())]
        return [report for report in found if "engines" in getattr(report, "keywords", ())]

    ran = [report for report in reports("passed", "failed") if report.when == "call"]
    skipped = reports("skipped")
    if ran or skipped:
        reasons = sorted({str(report.longrepr[2]) for report in skipped})
        why = f" ({'; '.join(reasons)})" if reasons else ""
        terminalreporter.write_line(
            f"against real engines: {len(ran)} cases ran, {len(skipped)} were skipped{why}"
        )
