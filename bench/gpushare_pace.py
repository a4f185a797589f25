"""Gate 3: programs that know nothing of GPU-share, under turnstile-pace.

What they share is one CPU core, which they are pinned to: as a card that one of them can use at a time, and whose work
can be counted without having one. On a machine that does other things as well all figures of a round suffer alike, so
rounds alternate between alone and shared, and medians count.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpushare_card import new_key

from turnstile.child import shim
from turnstile.child.guardian import Group
from turnstile.gpushare import pace_command
from turnstile.gpushare.look import look_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpushare_gates import Report

#: Of a schedule of weights 2 and 1.
PERIOD = 0.12
PATIENCE = 60.0

#: Counts what it does in the file that it is given.
BURNER_C = r"""
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int fd = argc > 1 ? open(argv[1], O_RDWR) : -1;
    volatile uint64_t *count = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (count == MAP_FAILED)
        return 1;
    volatile double x = 1;
    for (;;) {
        for (int i = 0; i < 2000; i++)
            x = x * 1.0000001 + 0.5;
        ++*count;
    }
}
"""
#: The same where there is no compiler.
BURNER_PYTHON = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    count = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
while True:
    for _ in range(2000):
        pass
    count[0] += 1
"""
#: Becomes a program that stays on one core, and is scheduled as any other.
PIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
os.execvp(sys.argv[2], sys.argv[2:])
"""


def pinned(core: int, program: list[str]) -> list[str]:
    """The command line of a program that stays on one core."""
    return [sys.executable, "-I", "-S", "-c", PIN, str(core), *program]


def core_times(core: int) -> tuple[float, float]:
    """Seconds that a core has worked, and all seconds that it has been there."""
    with open("/proc/stat", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"cpu{core} "))
    ticks = [int(word) for word in line.split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


def quietest_core() -> int:
    """The one that others leave alone most."""
    cores = sorted(os.sched_getaffinity(0))
    before = [core_times(core) for core in cores]
    time.sleep(1.0)
    after = [core_times(core) for core in cores]
    work = [(b[0] - a[0], core) for a, b, core in zip(before, after, cores, strict=True)]
    return min(work)[1]


class Program:
    """One that runs, under turnstile-pace if it has a card's key."""

    def __init__(self, program: list[str], log: Path, key: str, name: str, weight: float) -> None:
        argv = pace_command.command(program, weight=weight, name=name, gpu=key, on_death="kill")
        with open(log, "ab") as file:
            # Dies with us, and so does what it runs.
            command = shim.command(argv, owner=os.getpid())
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self._group = Group(self.process.pid)

    def end(self) -> None:
        """End it, and wait for that."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self._group.signal(9)
            self.process.wait()


def await_peers(key: str, count: int) -> None:
    """Wait until so many compute."""
    wait_for(
        lambda: sum(peer.active for peer in getattr(look_at(key), "peers", ())) == count,
        f"{count} active peers",
    )


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait, looking often."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it never came true: {what}")
        time.sleep(0.005)


def rates(counts: list[Callable[[], int]], seconds: float) -> list[float]:
    """How many a second each one counts, over whole periods."""
    seconds = round(seconds / PERIOD) * PERIOD
    began = time.monotonic()
    before = [count() for count in counts]
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return [(count() - was) / elapsed for count, was in zip(counts, before, strict=True)]


# -- programs that only compute --------------------------------------------------------------------


def build_burner(directory: Path) -> tuple[list[str], str]:
    """A program that computes and counts in the file that it is given; and what it is."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        source, binary = directory / "burner.c", directory / "burner"
        source.write_text(BURNER_C)
        command = [compiler, "-O1", "-o", str(binary), str(source)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return [str(binary)], "native programs"
    return [sys.executable, "-I", "-S", "-c", BURNER_PYTHON], "Python programs (no C compiler)"


class Burners:
    """Programs on one core, and what they have counted."""

    def __init__(self, directory: Path, core: int) -> None:
        self.directory = directory
        self._core = core
        self._program, self.what = build_burner(directory)
        self._number = 0

    @contextlib.contextmanager
    def run(self, weights: list[float], key: str) -> Iterator[list[Callable[[], int]]]:
        """Start one for each weight; gives what each has counted."""
        programs, counts, mappings = [], [], []
        try:
            for weight in weights:
                self._number += 1
                path = self.directory / f"count-{self._number}"
                path.write_bytes(bytes(4096))
                with open(path, "r+b") as file:
                    mapping = mmap.mmap(file.fileno(), 4096)
                view = memoryview(mapping).cast("Q")
                mappings.append((mapping, view))
                command = pinned(self._core, [*self._program, str(path)])
                log = self.directory / "log"
                programs.append(Program(command, log, key, f"w{weight:g}", weight))
                counts.append(lambda view=view: view[0])
            for count in counts:
                wait_for(count, "it computes")
            yield counts
        finally:
            for program in programs:
                program.end()
            for mapping, view in mappings:
                view.release()
                mapping.close()


def burn(report: Report, quick: bool, core: int) -> None:
    """Two programs at 2:1."""
    rounds, seconds = (2, 2.4) if quick else (5, 6.0)
    shares, totals, alone, unpaced = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        burners = Burners(Path(name), core)
        for number in range(rounds):
            with burners.run([1], "none") as counts:
                time.sleep(0.3)
                (before,) = rates(counts, seconds)
            with new_key(f"gate3-{number}") as key, burners.run([2, 1], key) as counts:
                await_peers(key, 2)
                time.sleep(0.5)
                two, one = rates(counts, seconds)
            with new_key(f"gate3-{number}a") as key, burners.run([1], key) as counts:
                time.sleep(0.3)
                (wrapped,) = rates(counts, seconds)
            shares.append(two / max(one, 1e-9))
            # Solo is measured on both sides of it: what others do to the core changes slowly, if it does.
            totals.append((two + one) / ((before + wrapped) / 2))
            alone.append(wrapped / before)
            report.line(
                f"round {number + 1}",
                f"alone {before:.0f}/s, 2:1 {two:.0f}/{one:.0f} = {two / max(one, 1e-9):.2f},"
                f" alone under turnstile-pace {wrapped:.0f}/s",
            )
        with burners.run([1, 1], "none") as counts:
            time.sleep(0.3)
            unpaced = rates(counts, seconds)
        report.line("two, unpaced", f"{unpaced[0]:.0f}/{unpaced[1]:.0f} a second")
    ratio, total = statistics.median(shares), statistics.median(totals)
    report.line("alone, paced to unpaced", f"{statistics.median(alone):.1%}")
    report.demand(f"{burners.what}: ratio", abs(ratio / 2 - 1) <= 0.1, f"{ratio:.2f}", "2 ± 10 %")
    report.demand(
        f"{burners.what}: aggregate", total >= 0.95, f"{total:.1%} of alone", ">= 95 % of alone"
    )


# -- llama-server ----------------------------------------------------------------------------------


class Server:
    """A llama-server, and a client that counts the tokens of one answer after the other."""

    def __init__(self, binary: str, model: Path, core: int, key: str, weight: float) -> None:
        self.name = f"llama{weight:g}"
        self._log = model.parent / f"{self.name}.log"
        arguments = "--host 127.0.0.1 --port 0 -t 1 -tb 1 -c 2048 -np 1 --no-webui --no-warmup"
        program = [binary, "-m", str(model), *arguments.split()]
        self._program = Program(pinned(core, program), self._log, key, self.name, weight)
        self.port = 0
        self.tokens = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def await_ready(self) -> None:
        """Wait until it answers."""

        def ready() -> bool:
            if self._program.process.poll() is not None:
                raise RuntimeError(self._log.read_text(errors="replace")[-2000:])
            log = self._log.read_text(errors="replace")
            found = re.findall(r"listening on http://127\.0\.0\.1:(\d+)", log)
            if not found:
                return False
            self.port = int(found[-1])
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            return False

        wait_for(ready, f"{self.name} is ready")

    def begin(self) -> None:
        """Have it generate without end."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Ask for nothing more, and wait until it is idle for its peers."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _generate(self) -> None:
        body = json.dumps(
            {"prompt": "once", "n_predict": 1000, "stream": True, "cache_prompt": False}
        )
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            connection.request("POST", "/completion", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            while not self._stop.is_set():
                line = answer.readline()
                if not line:
                    break
                self.tokens += line.startswith(b"data:")
            connection.close()

    def end(self) -> None:
        """End it."""
        self._stop.set()
        self._program.end()


def serve(report: Report, quick: bool, core: int) -> None:
    """Two llama-servers at 2:1."""
    binary = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if binary is None:
        report.line("llama-server", "not measured: none on PATH, and no LLAMA_SERVER")
        return
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from tiny_gguf import write_model

    rounds, seconds = (2, 3.6) if quick else (5, 7.2)
    shares, totals = [], []
    with new_key("gate3-llama") as key, tempfile.TemporaryDirectory() as name:
        model = Path(name) / "heavy.gguf"
        write_model(model, "heavy", context=4096)
        servers = [Server(binary, model, core, key, weight) for weight in (2.0, 1.0)]
        counts = [lambda server=server: server.tokens for server in servers]
        try:
            for server in servers:
                server.await_ready()
            for number in range(rounds):
                solo = []
                for which in (0, 1):
                    await_peers(key, 0)
                    servers[which].begin()
                    await_peers(key, 1)
                    time.sleep(0.5)
                    solo.append(rates([counts[which]], seconds / 2)[0])
                    servers[which].pause()
                for server in servers:
                    server.begin()
                await_peers(key, 2)
                time.sleep(1.0)
                two, one = rates(counts, seconds)
                for server in servers:
                    server.pause()
                shares.append(two / max(one, 1e-9))
                totals.append((two + one) / statistics.mean(solo))
                report.line(
                    f"llama-server, round {number + 1}",
                    f"alone {solo[0]:.1f}, {solo[1]:.1f} tokens/s;"
                    f" 2:1 {two:.1f}/{one:.1f} = {two / max(one, 1e-9):.2f}",
                )
        finally:
            for server in servers:
                server.end()
    ratio, total = statistics.median(shares), statistics.median(totals)
    report.demand("llama-server: ratio", abs(ratio / 2 - 1) <= 0.1, f"{ratio:.2f}", "2 ± 10 %")
    report.demand(
        "llama-server: aggregate", total >= 0.95, f"{total:.1%} of alone", ">= 95 % of alone"
    )


def gate_3(report: Report, quick: bool) -> None:
    """Programs under turnstile-pace."""
    report.title("Gate 3: programs under turnstile-pace, weights 2 and 1, on one core")
    core = quietest_core()
    worked, there = core_times(core)
    time.sleep(1.0)
    now_worked, now_there = core_times(core)
    others = (now_worked - worked) / max(now_there - there, 0.01)
    report.line("the core", f"{core}, {others:.0%} of it used by others")
    burn(report, quick, core)
    serve(report, quick, core)
