"""The log of a child: bounded while somebody writes to it, private, and its last lines readable by people."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.child import logfile
from turnstile.child.fanout import Fanout
from turnstile.child.logfile import RotatingLog


def make(path: Path, **how: int) -> RotatingLog:
    return RotatingLog(path, now=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), **how)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "b" / "sd-server.log"


def older(path: Path, number: int) -> Path:
    return Path(f"{path}.{number}")


HEAD = "turnstile: 2026-01-02T03:04:05+00:00: starting sd-server\n"


def test_each_run_begins_with_a_line_and_goes_on_in_the_same_file(path: Path) -> None:
    log = make(path)
    for run in ("one", "two"):
        fd = log.begin(["sd-server", "-m", "a b"] if run == "two" else ["sd-server"])
        os.write(fd, f"{run}\n".encode())
        assert log.tail(10) == [run]
    log.close()
    assert path.read_text() == HEAD + "one\n" + HEAD.strip() + " -m 'a b'\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_command_line_of_odd_bytes(path: Path) -> None:
    log = make(path)
    log.begin(["sd-server", os.fsdecode(b"\xff"), "ä"])
    log.close()
    assert path.read_bytes().endswith(b"starting sd-server '\xff' '\xc3\xa4'\n")


def test_it_is_rotated_under_the_hands_of_who_writes_on(path: Path) -> None:
    log = make(path, max_bytes=500, backups=2)
    fd = os.dup(log.begin(["sd-server"]))
    try:
        for number in range(300):
            os.write(fd, f"line {number:03}\n".encode())
            log.rotate_if_large()
        files = [older(path, 2), older(path, 1), path]
        text = "".join(file.read_text() for file in files)
        lines = text.splitlines()
        # Nothing is missing but the oldest, and that as a whole file.
        assert lines == [f"line {n:03}" for n in range(300 - len(lines), 300)] and len(lines) > 100
        assert not older(path, 3).exists()
        assert all(file.stat().st_size < 520 for file in files)
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    finally:
        os.close(fd)
        log.close()


def test_it_is_rotated_at_the_start_of_a_run(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("x" * 1000)
    log = make(path, max_bytes=500)
    log.begin(["sd-server"])
    log.close()
    assert path.read_text() == HEAD and older(path, 1).read_text() == "x" * 1000


def test_no_older_files_if_none_are_wanted(path: Path) -> None:
    log = make(path, max_bytes=50, backups=0)
    os.write(log.begin(["sd-server"]), b"x" * 100)
    log.rotate_if_large()
    log.close()
    assert path.read_bytes() == b"" and list(path.parent.iterdir()) == [path]


def test_what_cannot_be_kept_is_told_and_does_not_grow(path: Path) -> None:
    log = make(path, max_bytes=50, backups=1)
    os.write(log.begin(["sd-server"]), b"x" * 100)
    older(path, 1).mkdir()
    events: list[dict[str, object]] = []
    globalLogPublisher.addObserver(events.append)
    try:
        log.rotate_if_large()
    finally:
        globalLogPublisher.removeObserver(events.append)
    log.close()
    assert path.read_bytes() == b""
    assert [event["log_format"] for event in events] == [
        "the older part of {path} can't be kept: {reason}"
    ]


def test_a_full_disk_does_not_keep_a_program_from_its_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    log = make(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        fd = log.begin(["sd-server"])
    os.write(fd, b"there is room again\n")
    assert log.tail(5) == ["there is room again"]
    log.close()


def test_what_is_no_file_of_ours_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True)
    log = make(path)
    for make_it in (
        lambda: path.symlink_to("elsewhere"),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        make_it()
        with pytest.raises(OSError):
            log.begin(["sd-server"])
        path.rmdir() if path.is_dir() else path.unlink()
    assert log.tail(5) == []
    log.begin(["sd-server"])
    log.close()


def test_a_file_that_somebody_deletes_is_read_all_the_same(path: Path) -> None:
    log = make(path)
    fd = log.begin(["sd-server"])
    path.unlink()
    os.write(fd, b"last words\n")
    assert log.tail(1) == ["last words"]
    log.close()


# -- the last lines


def test_the_last_lines_come_from_older_files_if_need_be(path: Path) -> None:
    log = make(path, max_bytes=100)
    fd = log.begin(["sd-server"])
    os.write(fd, b"one\ntwo\n" + b"." * 100 + b"\nthree\n")
    log.rotate_if_large()
    assert log.tail(2) == ["." * 100, "three"]
    os.write(fd, b"four\n")
    assert log.tail(2) == ["three", "four"]
    # The run's first line is not its own, nor is what came before.
    assert log.tail(100) == ["one", "two", "." * 100, "three", "four"]
    os.write(fd, b"." * 100 + b"\n")
    log.rotate_if_large()
    assert log.tail(100) == ["four", "." * 100]
    log.close()
    assert log.tail(100) == []


def test_only_the_present_run_counts(path: Path) -> None:
    log = make(path)
    os.write(log.begin(["sd-server"]), b"of the first run\n")
    fd = log.begin(["sd-server"])
    assert log.tail(5) == []
    os.write(fd, b"of the second")
    assert log.tail(5) == ["of the second"]
    log.close()


def test_of_a_long_output_whole_lines_are_taken(path: Path) -> None:
    log = make(path, max_bytes=1 << 30)
    fd = log.begin(["sd-server"])
    lines = [f"{number:06} {'x' * 90}" for number in range(3000)]
    os.write(fd, "\n".join(lines).encode())
    assert log.tail(3) == lines[-3:]
    os.write(fd, b"\n" * 5000)
    assert log.tail(3) == lines[-3:]
    found = log.tail(10_000)
    assert len(found) > 500 and found == lines[-len(found) :]
    log.close()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"\n\n  \n", []),
        (b"a\nb\r\nc", ["a", "b", "c"]),
        # A progress bar: the last state of the line, also while it is being drawn anew.
        (b"\r |=>    | 1/3\r |==>   | 2/3\r |===>  | 3/3\n", ["|===>  | 3/3"]),
        (b"\r 1/3\r 2/3\r", ["2/3"]),
        (b"\x1b[31mred\x1b[0m \x1b[2Kx", ["red x"]),
        (b"\x1b]0;title\x07a\x00b\x08c\td\x7f", ["abc\td"]),
        (b"\x1b[", []),
        (b"caf\xc3\xa9 \xff", ["café \ufffd"]),
    ],
)
def test_lines_for_people(path: Path, text: bytes, lines: list[str]) -> None:
    log = make(path)
    os.write(log.begin(["sd-server"]), text)
    assert log.tail(9) == lines
    log.close()


@given(st.binary(max_size=400))
def test_whatever_is_written_nothing_in_the_lines_drives_a_terminal(data: bytes) -> None:
    for line in logfile._lines(data):
        assert line.strip() == line != ""
        assert all(c == "\t" or c.isprintable() or not c.isascii() for c in line)
        assert "\x9b" not in line and "\x1b" not in line and "\n" not in line


def test_a_very_long_line_is_cut(path: Path) -> None:
    log = make(path)
    os.write(log.begin(["sd-server"]), b"x" * 100_000)
    (line,) = log.tail(3)
    assert len(line) == logfile.TAIL_LINE and line.endswith("x…")
    log.close()


# -- one result for many


def test_a_result_for_many() -> None:
    result: Fanout[int] = Fanout()
    got: list[object] = []
    first, second = result.wait(), result.wait()
    first.addBoth(lambda r: got.append(("first", r)))
    second.addBoth(lambda r: got.append(("second", r.type.__name__)))
    second.cancel()
    assert not result.fired
    result.fire(5)
    result.fire(6)
    assert result.fired
    result.wait().addCallback(lambda r: got.append(("late", r)))
    assert got == [("second", "CancelledError"), ("first", 5), ("late", 5)]


def test_a_failure_for_many() -> None:
    result: Fanout[int] = Fanout()
    got: list[object] = []
    result.wait().addErrback(lambda f: got.append(f.value))
    error = ValueError("x")
    result.fire(Failure(error))
    result.wait().addErrback(lambda f: got.append(f.value))
    assert got == [error, error]


def test_who_asks_again_while_the_result_is_given_gets_it() -> None:
    result: Fanout[int] = Fanout()
    got: list[int] = []
    result.wait().addCallback(lambda _: result.wait().addCallback(got.append) and None)
    result.fire(5)
    assert got == [5]
