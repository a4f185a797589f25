"""GPU-share in real time: what it promises, measured, beside what happens without it.

    bench/gpushare [--check] [--quick] [--realtime] [--gates cost,1,2,3,4] [--torch cuda]

The card is simulated (gpushare_card.py), the processes and the time are real. Prints one table a gate with the
original's published figures for orientation; with ``--check`` it exits 1 if a demand is missed. A busy machine wakes
processes late, which costs ratio and throughput: measure on a quiet one, or let root ask for ``--realtime``
scheduling (the processes sleep nearly all of the time and keep nobody from working). ``--torch cuda`` takes a real card
for gate 2; bench/gpushare uses .venv's Python or python3, which must have torch then.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpushare_card import (
    STEP_NS,
    Card,
    Start,
    Steps,
    TorchCard,
    Worker,
    calibrate,
    churn,
    measure_overlap,
    new_key,
    run_workers,
)
from gpushare_pace import gate_3

from turnstile.gpushare import Peer
from turnstile.gpushare.look import look_at
from turnstile.gpushare.schedule import Claim, make_schedule

STEP_MS = STEP_NS / 1e6
#: Makes the card of gate 2, given a file of its own.
make_card: Callable[[Path], Card] = Card
#: What a scheduler may add to a gap between two tokens.
NOISE_MS = 15.0


class Report:
    """Prints figures, and keeps count of demands."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'-' * len(text)}", flush=True)

    def line(self, label: str, *values: str) -> None:
        print(f"  {label:<44}" + "  ".join(values), flush=True)

    def demand(self, label: str, met: bool, figure: str, wanted: str) -> None:
        verdict = "ok" if met else "MISSED"
        print(f"  {label:<44}{figure:<28} {wanted:<22} {verdict}", flush=True)
        if not met:
            self.missed.append(f"{label}: {figure}, wanted {wanted}")


# -- cost ------------------------------------------------------------------------------------------

COUNTED = """
import os, sys
from turnstile.gpushare import Peer
peer = Peer.join(sys.argv[1], "counted", thread=False)
def steps(number):
    for _ in range(number):
        with peer.step():
            pass
steps(1000)
os.write(1, b"BEGIN")
steps(10000)
os.write(1, b"END")
"""


def gate_cost(report: Report, quick: bool) -> None:
    """What a step costs, and what the import does."""
    report.title("Cost of a step, and of the import")
    with new_key("cost") as key, Peer.join(key, "me") as me, Peer.join(key, "other") as other:
        rounds, number = (3, 10_000) if quick else (10, 20_000)

        def measure(inside: bool) -> float:
            best = float("inf")
            for _ in range(rounds):
                cost, counted = 0, 0
                while counted < number:
                    if inside:
                        other.touch()
                        while me.look().lasts_us is None or not me.look().is_mine:
                            time.sleep(0.001)
                    began = time.thread_time_ns()
                    for _ in range(500):
                        with me.step():
                            pass
                    cost += time.thread_time_ns() - began
                    counted += 500
                best = min(best, cost / counted / 1000)
            return best

        alone = measure(inside=False)
        report.demand("alone", alone < 5, f"{alone:.2f} us", "< 5 us")
        shared = measure(inside=True)
        report.demand("inside the window, with a peer", shared < 5, f"{shared:.2f} us", "< 5 us")
        count_syscalls(report, key)
    times = []
    code = (
        "import time; t = time.process_time(); import turnstile.gpushare;"
        "print((time.process_time() - t) * 1000)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(8):  # the first one compiles
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, env=environ
            )
            times.append(float(done.stdout))
    report.line("import turnstile.gpushare", f"{min(times):.1f} ms of CPU time")


def count_syscalls(report: Report, key: str) -> None:
    """System calls of 10,000 steps of a peer that is alone."""
    strace = shutil.which("strace")
    if strace is None:
        report.line("system calls, alone", "not measured: no strace")
        return
    with new_key("counted") as key, tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace")
        command = [strace, "-f", "-o", str(trace), sys.executable, "-c", COUNTED, key]
        subprocess.run(command, capture_output=True)
        calls = trace.read_text().splitlines() if trace.exists() else []
    marks = [i for i, call in enumerate(calls) if re.search(r'write\(1, "(BEGIN|END)"', call)]
    if len(marks) != 2:
        report.line("system calls, alone", "not measured: strace does not work here")
        return
    found = [c for c in calls[marks[0] + 1 : marks[1]] if "--- SIG" not in c]
    report.demand("system calls, alone", not found, f"{len(found)} in 10000 steps", "0")


# -- gate 1 ----------------------------------------------------------------------------------------


def gate_1(report: Report, quick: bool) -> None:
    """Three see each other; one is killed."""
    report.title("Gate 1: three processes, one is killed")
    with new_key("gate1") as key, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        card = Card(directory / "card")
        workers = [Worker("a", 2.0), Worker("b"), Worker("c")]
        start = Start(len(workers))
        for worker in workers:
            worker.run(card, key, directory, start)
        start.go()
        deadline = time.monotonic() + 30
        shares: dict[str, float] = {}
        while time.monotonic() < deadline:
            snapshot = look_at(key)
            if snapshot is not None:
                by_slot = snapshot.get_shares()
                shares = {peer.name: by_slot[peer.slot] for peer in snapshot.peers}
                if sum(shares.values()) and len(shares) == 3 and min(shares.values()) > 0:
                    break
            time.sleep(0.01)
        time.sleep(2.2)
        snapshot = look_at(key)
        assert snapshot is not None
        busy = " ".join(f"{p.name} {p.busy:.0%}" for p in snapshot.peers)
        report.demand(
            "weights 2, 1, 1",
            shares == {"a": 0.5, "b": 0.25, "c": 0.25},
            " ".join(f"{who} {share:.0%}" for who, share in shares.items()),
            "a 50% b 25% c 25%",
        )
        report.line("measured busy", busy)
        victim = next(p for p in snapshot.peers if p.name == "b")
        killed = time.monotonic()
        os.kill(victim.pid, 9)
        while any(p.pid == victim.pid for p in (look_at(key) or snapshot).peers):
            time.sleep(0.01)
            if time.monotonic() - killed > 30:
                break
        aged = time.monotonic() - killed
        report.demand("kill -9: aged out after", aged <= 3.5, f"{aged:.2f} s", "<= 3.5 s")
        joined = [Peer.join(key, f"n{i}") for i in range(14)]
        slots = [peer.slot for peer in joined]
        report.demand("its slot is used again", victim.slot in slots, f"slot {victim.slot}", "yes")
        for peer in joined:
            peer.leave()
        for worker in workers:
            worker.end()


# -- gate 2 ----------------------------------------------------------------------------------------


def share_out(
    weights: tuple[float, ...],
    seconds: float,
    *,
    paced: bool = True,
    skew: float = 0.0,
) -> tuple[list[float], list[Steps], tuple[int, int]]:
    """Steps a second of each, once all are there."""
    with new_key("gate2") as key, tempfile.TemporaryDirectory() as name:
        card = make_card(Path(name) / "card")
        workers = [
            Worker(f"w{i}", weight, skew if i else 0.0, skew + seconds + 1.5, paced)
            for i, weight in enumerate(weights)
        ]
        done, epoch = run_workers(workers, card, key, Path(name))
    since = epoch + int((skew + 1.0) * 1e9)
    until = since + int(seconds * 1e9)
    steps = list(done.values())
    return [one.count(since, until) / seconds for one in steps], steps, (since, until)


def gate_2(report: Report, quick: bool) -> None:
    """Shares, throughput, gaps, release."""
    seconds = 5.0 if quick else 20.0
    report.title(f"Gate 2: shares of a card with steps of {STEP_MS:g} ms, {seconds:g} s each")
    (plain,), _, _ = share_out((1,), min(seconds, 10.0), paced=False)
    (solo,), _, _ = share_out((1,), min(seconds, 10.0))
    report.line("solo, unpaced", f"{plain:.1f} steps/s")
    report.demand("solo, paced", solo >= 0.97 * plain, f"{solo:.1f} steps/s", ">= 97 % of unpaced")
    rows: tuple[tuple[tuple[float, ...], float, str], ...] = (
        ((2, 1), 0.0, "75.6/38.4 = 1.97, 94 % of 121"),
        ((1, 1), 0.0, "58.9/59.0 = 1.00, 97 %"),
        ((2, 1, 1), 0.0, "56.5/27.3/29.5, 94 %"),
        ((2, 1), 5.0 if quick else 20.0, "1.99"),
    )
    for weights, skew, original in rows:
        label = ":".join(f"{weight:g}" for weight in weights)
        if skew:
            label += f", started {skew:g} s apart"
        else:
            rates, _, _ = share_out(weights, min(seconds, 10.0), paced=False)
            report.line(f"{label}, unpaced", describe_rates(rates, plain))
        rates, steps, (since, until) = share_out(weights, seconds, skew=skew)
        report.line(f"{label}, paced", describe_rates(rates, plain))
        report.line("  the original on an RTX 3090", original)
        total = sum(rates)
        ratios = [
            rate / max(rates[-1], 0.01) / (weights[i] / weights[-1])
            for i, rate in enumerate(rates[:-1])
        ]
        worst = max((abs(ratio - 1) for ratio in ratios), default=0)
        report.demand(f"  {label}: ratio", worst <= 0.05, f"off by {worst:.1%}", "<= 5 %")
        report.demand(
            f"  {label}: aggregate",
            total >= 0.97 * plain,
            f"{total / plain:.1%} of solo",
            ">= 97 %",
        )
        schedule = make_schedule(Claim(i, w) for i, w in enumerate(weights))
        for i, one in enumerate(steps):
            gaps = sorted(one.gaps(since, until))
            window = schedule.get_window(i)
            stall = (schedule.period_us - window.end_us + window.start_us) / 1000
            bound = stall + STEP_MS + NOISE_MS
            p95 = gaps[int(len(gaps) * 0.95)]
            report.demand(
                f"  {label}: gaps of weight {weights[i]:g}",
                p95 <= bound and gaps[-1] <= bound + STEP_MS,
                f"p50 {statistics.median(gaps):.0f} p95 {p95:.0f} max {gaps[-1]:.0f} ms",
                f"{stall:.0f} + {STEP_MS:g} ms + noise",
            )
        stretches, overlapped = measure_overlap(steps, since, until)
        report.line(
            "  two inside at once",
            f"longest {stretches[0] if stretches else 0:.1f} ms",
            f"in all {overlapped / ((until - since) / 1e6):.1%} of the time",
        )
    gate_2_release(report, plain)
    report.line("  the original, gaps at 2:1", "w2 p95 45 max 49, w1 p95 86 max 89 ms")


def describe_rates(rates: list[float], solo: float) -> str:
    """Each one's steps a second, the ratio to the last, and the sum."""
    each = "/".join(f"{rate:.1f}" for rate in rates)
    ratio = ":".join(f"{rate / max(rates[-1], 0.01):.2f}" for rate in rates)
    return f"{each} steps/s = {ratio}, {sum(rates) / solo:.1%} of solo"


def gate_2_release(report: Report, plain: float) -> None:
    """How soon a peer is as fast as alone, once the other one idles."""
    with new_key("release") as key, tempfile.TemporaryDirectory() as name:
        card = make_card(Path(name) / "card")
        workers = [Worker("stays", 1.0, stop=12.0), Worker("idles", 2.0, stop=5.0)]
        done, _ = run_workers(workers, card, key, Path(name))
    idle = done["idles"].done[-1]
    stays = done["stays"].done
    after = [at for at in stays if at >= idle]
    # From when on the next half second holds what it holds alone.
    needed = 0.97 * plain * 0.5
    regained = float("inf")
    for i, at in enumerate(after):
        if sum(at < later <= at + 500_000_000 for later in after[i:]) >= needed:
            regained = (at - idle) / 1e9
            break
    report.demand(
        "solo rate after the other idles", regained <= 2.5, f"{regained:.2f} s", "<= 2.5 s"
    )


# -- gate 4 ----------------------------------------------------------------------------------------


def gate_4(report: Report, quick: bool) -> None:
    """16 peers that come and go."""
    seconds = 10.0 if quick else 60.0
    report.title(f"Gate 4: 16 processes that join, leave, are killed, for {seconds:g} s")
    with new_key("gate4") as key, tempfile.TemporaryDirectory() as name:
        card = Card(Path(name) / "card")
        result = churn(card, key, Path(name), seconds, seed=4)
        report.line("processes", f"{result.lives}, of which {result.killed} were killed")
        report.demand("errors", not result.troubles, f"{len(result.troubles)}", "none")
        for trouble in result.troubles[:10]:
            print(f"    {trouble}")
        done = sum(len(one.done) for one in result.steps)
        strays = sorted(s for one in result.steps for s in one.stray if s)
        report.line("steps", f"{done}", f"{len(strays)} begun outside the own window")
        stretches, overlapped = measure_overlap(result.steps)
        longest = stretches[0] if stretches else 0.0
        report.demand(
            "two owners: longest",
            longest <= 2 * STEP_MS + NOISE_MS,
            f"{longest:.1f} ms ({overlapped / (seconds * 1000):.1%} in all)",
            "one step, and noise",
        )
        # Nobody is left to beat: in three seconds all are dead.
        time.sleep(3.1)
        left = look_at(key)
        alive = [] if left is None else [peer.pid for peer in left.peers]
        joined = [Peer.join(key, f"n{i}") for i in range(16)]
        slots = sorted(peer.slot for peer in joined if peer.slot is not None)
        report.demand(
            "no stuck slot",
            not alive and slots == list(range(16)),
            f"{len(slots)} of 16 to be had, {len(alive)} alive",
            "16, 0",
        )
        for peer in joined:
            peer.leave()


GATES = {"cost": gate_cost, "1": gate_1, "2": gate_2, "3": gate_3, "4": gate_4}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a demand is missed")
    parser.add_argument("--quick", action="store_true", help="shorter, for a first look")
    parser.add_argument("--realtime", action="store_true", help="SCHED_FIFO; needs root")
    parser.add_argument("--gates", default=",".join(GATES), help="which ones, with commas")
    parser.add_argument("--torch", metavar="DEVICE", help="gate 2 on cuda, or cpu for a try")
    options = parser.parse_args()
    chosen = options.gates.split(",")
    if unknown := set(chosen) - set(GATES):
        parser.error(f"no gate {', '.join(sorted(unknown))}: there are {', '.join(GATES)}")
    report = Report()
    cores = len(os.sched_getaffinity(0))
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    how = ", SCHED_FIFO" if options.realtime else ""
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}{how}")
    if options.torch:
        global make_card
        with tempfile.TemporaryDirectory() as directory:
            products = calibrate(options.torch, Path(directory))
        print(f"gate 2: {products} products a step on {options.torch}")
        make_card = functools.partial(TorchCard, device=options.torch, products=products)
    for name in chosen:
        GATES[name](report, options.quick)
    print(f"\n{len(report.missed)} demands missed")
    for missed in report.missed:
        print(f"  {missed}")
    return 1 if options.check and report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
