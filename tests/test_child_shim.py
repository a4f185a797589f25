"""What a child is between fork and exec: its process, its environment, its gate, and what is told when exec fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_kit import owner, runs, stat, state, until

from turnstile.child import shim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def run(*program: str, env: dict[str, str] | None = None, **how: Any) -> tuple[int, str, str]:
    """Run a program by way of the shim to its end: exit code, output, errors."""
    done = subprocess.run(
        shim.command(program, **how),
        env=env if env is None else {"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        input="what the owner has on standard input",
    )
    return done.returncode, done.stdout, done.stderr


def fields(program: tuple[str, ...] = ("cat", "/proc/self/stat"), **how: Any) -> list[str]:
    code, out, err = run(*program, **how)
    assert (code, err) == (0, "")
    return [out.split()[0], *out[out.rindex(")") + 2 :].split()]


# -- what the program finds


def test_the_program_leads_a_session_without_a_terminal() -> None:
    pid, _, parent, group, session, terminal, *_ = fields(owner=os.getpid())
    assert (group, session, terminal) == (pid, pid, "0")
    assert int(parent) == os.getpid()


def test_a_process_that_leads_a_session_already_is_left_as_it_is() -> None:
    done = subprocess.run(
        shim.command(["cat", "/proc/self/stat"]),
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    pid = done.stdout.split()[0]
    assert done.stdout[done.stdout.rindex(")") + 2 :].split()[2:4] == [pid, pid]


def test_standard_input_is_at_its_end() -> None:
    assert run("cat") == (0, "", "")
    assert run("readlink", "/proc/self/fd/0") == (0, "/dev/null\n", "")
    # Whoever asks for the terminal instead gets none.
    code, _, err = run("sh", "-c", ": </dev/tty")
    assert code != 0 and "/dev/tty" in err


def test_standard_input_may_be_the_owners() -> None:
    assert run("cat", null_stdin=False) == (0, "what the owner has on standard input", "")


def test_standard_input_is_at_its_end_even_if_the_owner_had_none() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *shim.command(["readlink", "/proc/self/fd/0"])],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "/dev/null\n")


def test_only_what_systemd_said_to_the_owner_leaves_the_environment() -> None:
    kept = {"A": "1", "LISTENER": "x", "XDG_CACHE_HOME": "/c", "UTF": "ä€", "EMPTY": ""}
    gone = {
        name: "x"
        for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC")
    }
    code, out, err = run("env", "-0", env=kept | gone | {"LC_ALL": "C.UTF-8"})
    assert (code, err) == (0, "")
    found = dict(item.split("=", 1) for item in out.split("\0") if item)
    assert found == kept | {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


def test_arguments_come_through_byte_for_byte() -> None:
    odd = ["", "a b", "--", "-c", "ä", os.fsdecode(b"\xff\xfe"), "x\ny", "'\"$`\\"]
    done = subprocess.run(
        shim.command(["printf", "%s\\0", *odd]), capture_output=True, env={"LC_ALL": "C"}
    )
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(text) for text in odd]


def test_signals_are_what_a_program_expects() -> None:
    def as_in_a_reactor() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])

    done = subprocess.run(
        shim.command(["grep", "Sig", "/proc/self/status"]),
        preexec_fn=as_in_a_reactor,
        capture_output=True,
        text=True,
    )
    masks = dict(line.split(":\t") for line in done.stdout.splitlines() if "Q" not in line)
    assert int(masks["SigBlk"], 16) == 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
        assert not int(masks["SigIgn"], 16) >> (number - 1) & 1, number


# -- what cannot be run


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "plain").write_text("no program")
    (tmp_path / "garbage").write_bytes(b"\0garbage")
    (tmp_path / "orphan").write_text("#!/no/such/interpreter\n")
    for name in ("garbage", "orphan"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("{}/absent", 127, "No such file"),
        ("{}/plain/absent", 127, "Not a directory"),
        ("turnstile-no-such-program", 127, "looked for on PATH"),
        ("{}/plain", 126, "Permission denied"),
        ("{}", 126, "Permission denied"),
        ("{}/garbage", 126, "Exec format error"),
        ("{}/orphan", 126, "its interpreter or loader does not"),
    ],
)
def test_a_program_that_cannot_run_is_told(files: Path, name: str, code: int, reason: str) -> None:
    name = name.format(files)
    found, out, err = run(name, "argument")
    assert (found, out) == (code, "")
    assert err.startswith(f"turnstile: cannot run {name!r}: ") and reason in err
    assert err.count("\n") == 1


def test_a_program_on_path_that_is_not_executable(files: Path) -> None:
    code, _, err = run("plain", env={"PATH": f"{files}:/no/such/place"})
    assert code == 126 and "Permission denied" in err


@pytest.mark.parametrize("program", [[], [""]])
def test_no_program_is_an_error_of_the_caller(program: list[str]) -> None:
    with pytest.raises(ValueError):
        shim.command(program)


# -- the owner's death

FORKS_AND_DIES = """
import os, subprocess, sys, time
from turnstile.child import shim
child = subprocess.Popen(shim.command(["sleep", "600"], owner=os.getpid()))
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
os._exit(0)
"""


def test_a_child_of_somebody_else_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code, _, err = run("touch", str(marker), owner=os.getppid())
    assert code == shim.NOT_STARTED and not marker.exists()
    assert err == ""


# At any moment of the shim's life, which is over after some 20 to 40 ms: before the kernel is told, between that and
# the check of the parent, and when the program runs.
@pytest.mark.parametrize("milliseconds", [0, 5, 10, 15, 20, 30, 50, 80])
def test_a_child_whose_parent_dies_at_any_moment_dies_too(milliseconds: int) -> None:
    with owner(FORKS_AND_DIES, str(milliseconds / 1000)) as parent:
        pid = parent.number()
        parent.process.wait()
        until(lambda: not runs(pid), "the child's end")


AT_THE_GATE = """
import os, subprocess, sys
from turnstile.child import shim
gate = int(sys.argv[1])
command = shim.command(["sleep", "600"], owner=os.getpid(), gate=gate)
print(subprocess.Popen(command, pass_fds=[gate]).pid, flush=True)
sys.stdin.read()
"""


def test_a_child_that_waits_at_its_gate_dies_with_its_parent() -> None:
    read, write = os.pipe()
    with owner(AT_THE_GATE, str(read), pass_fds=[read]) as parent:
        pid = parent.number()
        os.close(read)
        # In a session of its own it has passed the first step; the kernel knows of the parent from the next one on.
        until(lambda: stat(pid)[3:4] == [str(pid)], "the child's session")
        until(lambda: state(pid) == "S", "the child at its gate")
        parent.kill()
        # The gate's other end is ours, and still open: it is not that which ends the child.
        until(lambda: not runs(pid), "the child's end")
    os.close(write)


def test_a_child_may_outlive_its_parent() -> None:
    program = FORKS_AND_DIES.replace("owner=os.getpid()", "owner=None")
    with owner(program, "0") as parent:
        pid = parent.number()
        parent.process.wait()
        until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the program")
        assert runs(pid)


# -- the gate


def start_at_gate(marker: Path) -> tuple[subprocess.Popen[bytes], int]:
    read, write = os.pipe()
    process = subprocess.Popen(
        shim.command(
            ["sh", "-c", 'exec ls /proc/self/fd >"$1"', "sh", str(marker)],
            owner=os.getpid(),
            gate=read,
        ),
        pass_fds=[read],
    )
    os.close(read)
    return process, write


def test_the_program_starts_when_the_gate_opens(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    process, write = start_at_gate(marker)
    until(lambda: stat(process.pid)[3:4] == [str(process.pid)], "the child's session")
    until(lambda: state(process.pid) == "S", "the child at its gate")
    assert not marker.exists()
    os.write(write, b".")
    assert process.wait() == 0
    os.close(write)
    # The last is the directory that ls reads; the gate's is gone.
    assert marker.read_text().split() == ["0", "1", "2", "3"]


def test_a_gate_that_nobody_will_open_ends_the_child(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    process, write = start_at_gate(marker)
    os.close(write)
    assert process.wait() == shim.NOT_STARTED
    assert not marker.exists()
