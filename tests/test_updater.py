"""Updates as a whole: a forge over TLS, what is installed and what never is, and leaving once the card is idle."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_twisted
from release_kit import OTHER_KEY, Certificates, Forge, make_root, make_wheel, public_pem
from system_kit import clean, reactor, until
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.logger import formatEvent, globalLogPublisher

from turnstile import log as tlog
from turnstile.arbiter import Arbiter, Kind, Tenant
from turnstile.card import Card
from turnstile.config import Config
from turnstile.update import download, fetch, updater
from turnstile.update.download import Downloader, DownloadError
from turnstile.update.fetch import Source, find_update, install_update
from turnstile.update.layout import Layout
from turnstile.update.release import NothingNew, NotUsable, Repository
from turnstile.update.signature import load_keys
from turnstile.update.updater import CONFIRM_AFTER, IdleWatch, Program, Updater

OLLAMA = Tenant("ollama", Kind.SHARED)
COMFY = Tenant("comfyui", Kind.EXCLUSIVE)
KEYS = load_keys([public_pem()])
CERTIFICATES = Certificates()


@asynccontextmanager
async def forge(certificates: Certificates = CERTIFICATES) -> AsyncIterator[Forge]:
    found = Forge(reactor, certificates)
    try:
        yield found
    finally:
        await found.stop()
    await until(clean, "a clean reactor")


def downloader(policy: Any = None) -> Downloader:
    return Downloader(reactor, policy or CERTIFICATES.policy())


def source(forge: Forge, keys: Any = KEYS) -> Source:
    return Source(
        repository=Repository.parse(forge.repository),
        asset="turnstile-*-py3-none-any.whl",
        keys=keys,
    )


async def find(forge: Forge, running: str = "0.1.0", keys: Any = KEYS) -> tuple[str, bytes]:
    found: tuple[str, bytes] = await find_update(
        downloader(), source(forge, keys), running, frozenset()
    )
    return found


# -- downloads


@pytest_twisted.ensureDeferred
async def test_a_download() -> None:
    async with forge() as f:
        f.files = {"x": b"content"}
        assert await downloader().get(f"{f.url}/download/x", 7) == b"content"
        f.instead["/a"] = "/b"
        f.instead["/b"] = f"{f.url}/download/x"
        assert await downloader().get(f"{f.url}/a", 7) == b"content"


async def refused(url: str, limit: int = 1000, policy: Any = None) -> str:
    with pytest.raises(DownloadError) as caught:
        await downloader(policy).get(url, limit)
    return str(caught.value)


@pytest_twisted.ensureDeferred
async def test_downloads_that_are_refused() -> None:
    async with forge() as f:
        f.files = {"x": bytes(100_000)}
        f.instead |= {"/plain": f.url.replace("https", "http") + "/download/x", "/round": "/round"}
        f.instead |= {"/file": "file:///etc/passwd", "/gone": 410, "/other": "//localhost:1/x"}
        x = f"{f.url}/download/x"
        assert await refused(x, 99_999) == f"{x}: more than 99999 bytes"
        assert "leads to an address that is not https" in await refused(f"{f.url}/plain")
        assert "leads to an address that is not https" in await refused(f"{f.url}/file")
        assert "leads to an address that is not https" in await refused(x.replace("https", "http"))
        assert "more than 5 redirects" in await refused(f"{f.url}/round")
        assert "status 410" in await refused(f"{f.url}/gone")
        assert "status 404" in await refused(f"{f.url}/download/y")
        assert "refused" in await refused(f"{f.url}/other")
        assert f.asked.count("/round") == 6
        assert "/download/x" in f.asked


@pytest_twisted.ensureDeferred
async def test_a_forge_that_nobody_vouches_for() -> None:
    async with forge() as f:
        f.files = {"x": b"content"}
        stranger = Certificates().policy()
        said = await refused(f"{f.url}/download/x", policy=stranger)
        assert said.endswith("its certificate is not to be trusted, or it speaks no TLS")
        assert f.asked == []
    # The name counts, too.
    elsewhere = Certificates("elsewhere")
    async with forge(elsewhere) as f:
        said = await refused(f"{f.url}/download/x", policy=elsewhere.policy())
        assert said == f"{f.url}/download/x: its certificate is for another host"
        assert f.asked == []


@pytest_twisted.ensureDeferred
async def test_a_length_that_is_not_told_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forge() as f:
        f.files = {"x": bytes(100_000)}
        original = f.answer

        def in_pieces(request: Any) -> Any:
            request.write(original(request))  # before the end: chunked
            return b""

        monkeypatch.setattr(f, "answer", in_pieces)
        said = await refused(f"{f.url}/download/x", 5000)
        assert said.endswith("more than 5000 bytes")


@pytest_twisted.ensureDeferred
async def test_a_forge_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WHOLE_TIMEOUT", 0.2)
    async with forge() as f:
        f.hangs.add("/x")
        assert (await refused(f"{f.url}/x")).endswith("/x: not done within 0.2 s")


# -- finding


@pytest_twisted.ensureDeferred
async def test_a_newer_release_is_found() -> None:
    async with forge() as f:
        name = f.release("0.2.0")
        assert await find(f) == ("0.2.0", f.files[name])
        del f.files[f"{name}.sha256"]
        assert (await find(f))[0] == "0.2.0"
        # A file may lie elsewhere, as GitHub's do.
        f.instead[f"/download/{name}"] = "/download/elsewhere"
        f.files["elsewhere"] = f.files[name]
        assert (await find(f))[0] == "0.2.0"


def _spoil(change: Callable[[Forge, str], Any]) -> Callable[[Forge], None]:
    def spoil(f: Forge) -> None:
        change(f, f.release("0.2.0"))

    return spoil


def _without(f: Forge, name: str) -> None:
    del f.files[f"{name}.sig"]


def _tampered(f: Forge, name: str) -> None:
    f.files[name] = f.files[name].replace(b"turnstile/tap.py", b"turnstile/tip.py")
    del f.files[f"{name}.sha256"]


def _truncated(f: Forge, name: str) -> None:
    f.files[name] = f.files[name][:-1]
    del f.files[f"{name}.sha256"]


def _damaged(f: Forge, name: str) -> None:
    f.files[name] = f.files[name].replace(b"turnstile/tap.py", b"turnstile/tip.py")


def _no_signature(f: Forge, name: str) -> None:
    f.files[f"{name}.sig"] = b""


def _large_signature(f: Forge, name: str) -> None:
    f.files[f"{name}.sig"] = bytes(5000)


def _another_programs(f: Forge, name: str) -> None:
    f.release("0.2.0", make_wheel("0.2.0", name="other"))


def _old_one_under_a_new_name(f: Forge, name: str) -> None:
    f.release("0.2.0", make_wheel("0.0.9"))


def _by_somebody_else(f: Forge, name: str) -> None:
    f.release("0.2.0", key=OTHER_KEY)


def _not_a_wheel(f: Forge, name: str) -> None:
    f.release("0.2.0", b"#!/bin/sh\n")


def _needs_more(f: Forge, name: str) -> None:
    f.release("0.2.0", make_wheel("0.2.0", requires=("attrs>=99",)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_spoil(_without), "v0.2.0 is not signed"),
        (_spoil(_tampered), "its signature is not its publisher's"),
        (_spoil(_truncated), "its signature is not its publisher's"),
        (_spoil(_damaged), "its checksum is not the file's"),
        (_spoil(_no_signature), "its signature has 0 bytes instead of 64"),
        (_spoil(_large_signature), "more than 4096 bytes"),
        (_spoil(_by_somebody_else), "its signature is not its publisher's"),
        (_spoil(_another_programs), "it is the program 'other'"),
        (_spoil(_old_one_under_a_new_name), "it says that it is version '0.0.9', not 0.2.0"),
        (_spoil(_not_a_wheel), "it is no wheel"),
        (_spoil(_needs_more), "it needs attrs >=99"),
        (lambda f: f.release("0.0.9"), "the latest release is v0.0.9, older than 0.1.0 that runs"),
        (lambda f: f.release("0.2.0", tag="0.2.0"), "is not named vX.Y.Z"),
        (lambda f: f.release("0.2.0", draft=True), "is a draft or a pre-release"),
        (lambda f: f.release("0.2.0", prerelease=True), "is a draft or a pre-release"),
        (lambda f: None, "status 404"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_never_installed(spoil: Callable[[Forge], None], reason: str) -> None:
    async with forge() as f:
        spoil(f)
        with pytest.raises((NotUsable, DownloadError)) as caught:
            await find(f)
        assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest_twisted.ensureDeferred
async def test_without_a_key_nobody_is_asked() -> None:
    async with forge() as f:
        f.release("0.2.0")
        with pytest.raises(NotUsable, match="has no publisher's key"):
            await find(f, keys=())
        assert f.asked == []


@pytest_twisted.ensureDeferred
async def test_nothing_is_downloaded_that_is_not_wanted() -> None:
    async with forge() as f:
        f.release("0.2.0")
        with pytest.raises(NothingNew):
            await find(f, "0.2.0")
        for running in ("0.3.0", "0.2.1.dev1+g0"):
            with pytest.raises(NotUsable):
                await find(f, running)
        assert {path.rpartition("/")[2] for path in f.asked} == {"latest"}


@pytest_twisted.ensureDeferred
async def test_a_file_that_is_longer_than_it_was_said_to_be() -> None:
    async with forge() as f:
        name = f.release("0.2.0")
        f.files["longer"] = f.files[name] + b"\0"
        f.instead[f"/download/{name}"] = "/download/longer"
        with pytest.raises(DownloadError, match="more than"):
            await find(f)
        f.files["shorter"] = f.files[name][:-1]
        f.instead[f"/download/{name}"] = "/download/shorter"
        del f.files[f"{name}.sha256"]
        with pytest.raises(NotUsable, match=r"it has \d+ bytes instead of \d+"):
            await find(f)


# -- installing


def make_installation(folder: Path, *versions: str) -> Layout:
    """One whose Python is this one."""
    root = make_root(folder, *versions or ("0.1.0",))
    (root / "venv").symlink_to(sys.prefix)
    return Layout(root)


@pytest_twisted.ensureDeferred
async def test_an_update_is_put_in_place(tmp_path: Path) -> None:
    layout = make_installation(tmp_path)
    await install_update(reactor, layout, "0.2.0", make_wheel("0.2.0"))
    assert (layout.current, layout.on_trial) == ("0.2.0", "0.2.0")
    assert (layout.root / "current" / "turnstile" / "tap.py").exists()
    assert sorted(path.name for path in layout.releases.iterdir()) == ["0.1.0", "0.2.0"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"turnstile/service.py": "import nobody_has_this\n"}, "No module named 'nobody_has_this'"),
        ({"turnstile/tap.py": "import os; os._exit(7)\n"}, "status 7"),
        ({"turnstile/tap.py": "import os; os.abort()\n"}, "status -6"),
        ({"turnstile/__init__.py": "__version__ = '0.3.0'\n"}, "it says that it is '0.3.0'"),
        ({"../x": ""}, "it holds something odd"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_does_not_start_is_not_put_in_place(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    layout = make_installation(tmp_path)
    with pytest.raises(NotUsable) as caught:
        await install_update(reactor, layout, "0.2.0", make_wheel("0.2.0", files=files))
    assert str(caught.value).startswith("v0.2.0 is not installed: ") and reason in str(caught.value)
    assert (layout.current, layout.on_trial) == ("0.1.0", None)
    assert [path.name for path in layout.releases.iterdir()] == ["0.1.0"]


@pytest_twisted.ensureDeferred
async def test_what_hangs_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "TRIAL_TIMEOUT", 1.0)
    layout = make_installation(tmp_path)
    pid = tmp_path / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    with pytest.raises(NotUsable, match="it took more than 1 s"):
        await install_update(
            reactor, layout, "0.2.0", make_wheel("0.2.0", files={"turnstile/tap.py": code})
        )
    assert layout.current == "0.1.0"
    if pid.exists():  # else it did not even come to that
        await until(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "its end")


@pytest_twisted.ensureDeferred
async def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    layout = make_installation(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("turnstile.update.wheel.unpack", full)
    with pytest.raises(NotUsable, match=r"v0\.2\.0 is not installed: No space left on device: x"):
        await install_update(reactor, layout, "0.2.0", make_wheel("0.2.0"))
    assert [path.name for path in layout.releases.iterdir()] == ["0.1.0"]


# -- leaving


@attrs.define
class Leaving:
    """An idle watch over a card."""

    clock: Clock = attrs.Factory(Clock)
    calls: list[float] = attrs.Factory(list)
    arbiter: Arbiter = attrs.field()
    card: Card = attrs.field()

    @arbiter.default
    def _arbiter(self) -> Arbiter:
        return Arbiter(self.clock)

    @card.default
    def _card(self) -> Card:
        return Card(self.clock)

    def watch(self) -> IdleWatch:
        return IdleWatch(
            self.clock,
            self.arbiter,
            self.card,
            lambda: self.calls.append(self.clock.seconds()),
        )


def test_an_idle_card_is_left_at_once() -> None:
    leaving = Leaving()
    leaving.watch()
    assert leaving.calls == []
    leaving.clock.advance(0)
    assert leaving.calls == [0.0]
    leaving.arbiter.try_acquire(OLLAMA).release()  # type: ignore[union-attr]
    leaving.clock.advance(1)
    assert leaving.calls == [0.0]


def test_who_has_the_card_and_who_waits_comes_first() -> None:
    leaving = Leaving()
    clock, arbiter = leaving.clock, leaving.arbiter
    chat = arbiter.try_acquire(OLLAMA)
    jobs: list[Any] = []
    for _ in range(2):
        arbiter.acquire(COMFY).addCallback(jobs.append)
    leaving.watch()
    clock.advance(5)
    assert chat is not None
    chat.release()
    clock.advance(5)
    for _ in range(2):
        assert leaving.calls == []
        jobs[-1].release()
        clock.advance(5)
    assert leaving.calls == [20.0]


def test_a_card_that_is_idle_between_two_jobs_is_not_left() -> None:
    leaving = Leaving()
    first = leaving.arbiter.try_acquire(OLLAMA)
    leaving.watch()
    leaving.clock.advance(1)
    assert first is not None
    first.release()
    second = leaving.arbiter.try_acquire(OLLAMA)
    leaving.clock.advance(1)
    assert leaving.calls == []
    assert second is not None
    second.release()
    leaving.clock.advance(1)
    assert leaving.calls == [3.0]


def test_a_held_card_is_not_idle() -> None:
    leaving = Leaving()
    resume = leaving.arbiter.hold()
    leaving.watch()
    leaving.clock.advance(0)
    resume()
    assert leaving.calls == []
    leaving.clock.advance(1)
    assert len(leaving.calls) == 1


def test_a_watch_that_is_ended() -> None:
    leaving = Leaving()
    watch = leaving.watch()
    watch.cancel()
    leaving.clock.advance(10)
    assert leaving.calls == [] and leaving.clock.getDelayedCalls() == []


# -- the updater


@pytest.fixture
def said() -> Any:
    events: list[Any] = []
    level = tlog._rank
    tlog.set_level("info")
    globalLogPublisher.addObserver(events.append)
    yield lambda: [str(formatEvent(event)) for event in events]
    globalLogPublisher.removeObserver(events.append)
    tlog._rank = level


class Bench:
    """An updater whose looks are the test's own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        *,
        managed: bool = True,
        layout: bool = True,
        keys: Any = KEYS,
        version: str = "0.1.0",
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.arbiter, self.card = Arbiter(self.clock), Card(self.clock)
        self.found: Any = NothingNew(KEYS)  # type: ignore[arg-type]
        self.looks: list[str] = []
        self.installs: list[str] = []
        self.left = 0
        self.layout = Layout(make_root(tmp_path, version)) if layout else None
        defaults = {"update_repo": Repository.parse("https://forge/o/r"), "auto_update": None}
        self.config = Config(**{**defaults, **settings})
        monkeypatch.setattr(updater, "find_update", self._find)
        monkeypatch.setattr(updater, "install_update", self._install)
        self.updater = Updater(
            self.clock,
            self.config,
            Program(version, self.layout, managed),
            keys,
            lambda: None,  # type: ignore[arg-type,return-value]
            self.arbiter,
            self.card,
            self._leave,
        )

    def _find(self, fetcher: Any, source: Source, running: str, refused: Any) -> Any:
        self.looks.append(running)
        if isinstance(self.found, Deferred):
            return self.found
        return fail(self.found) if isinstance(self.found, Exception) else succeed(self.found)

    def _install(self, reactor: Any, layout: Any, version: str, data: bytes) -> Any:
        self.installs.append(version)
        return succeed(None)

    def _leave(self) -> None:
        self.left += 1

    def begin(self) -> None:
        self.updater.came_up()
        self.clock.advance(CONFIRM_AFTER)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return lambda **more: Bench(monkeypatch, tmp_path, **more)


def test_it_looks_at_the_start_and_at_every_interval(bench: Any, said: Any) -> None:
    b = bench(update_interval=3600.0)
    b.found = NothingNew("0.1.0")
    b.updater.came_up()
    assert b.looks == []
    b.clock.advance(CONFIRM_AFTER)
    assert b.looks == ["0.1.0"]
    b.clock.pump([600.0] * 12)
    assert len(b.looks) == 3
    b.updater.stop()
    assert b.clock.getDelayedCalls() == []
    assert said() == ["no update: 0.1.0 is the latest release"] * 3


def test_a_managed_process_leaves_once_the_card_is_idle(bench: Any, said: Any) -> None:
    b = bench()
    b.found = ("0.2.0", b"wheel")
    chat = b.arbiter.try_acquire(OLLAMA)
    b.begin()
    b.clock.advance(60)
    assert (b.installs, b.left) == (["0.2.0"], 0)
    chat.release()
    b.clock.advance(1)
    assert b.left == 1
    assert said() == [
        "turnstile 0.2.0 is installed; it is started as soon as the card is idle",
        "leaving for turnstile 0.2.0",
    ]
    b.updater.stop()


def test_an_interactive_process_only_says_so(bench: Any, said: Any) -> None:
    b = bench(managed=False)
    b.found = ("0.2.0", b"wheel")
    b.begin()
    b.clock.advance(60)
    assert (b.installs, b.left) == (["0.2.0"], 0)
    assert said() == ["turnstile 0.2.0 is installed: restart to apply"]
    # The next look is for something newer than that.
    b.found = NothingNew("0.2.0")
    b.clock.advance(6 * 3600.0)
    assert b.looks == ["0.1.0", "0.2.0"]
    b.updater.stop()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"auto_update": False}, []),
        ({"keys": ()}, []),
        ({"layout": False}, []),  # a distribution's package, a container
        (
            {"layout": False, "auto_update": True},
            ["turnstile-service did not make this installation"],
        ),
        ({"keys": (), "auto_update": True}, ["this build of turnstile has no publisher's key"]),
        ({"update_repo": None}, ["UPDATE_REPO is not set"]),
    ],
)
def test_where_there_are_no_updates(
    bench: Any, said: Any, options: dict[str, Any], lines: list[str]
) -> None:
    b = bench(**options)
    b.begin()
    b.clock.advance(24 * 3600.0)
    assert b.looks == []
    assert said() == [f"no automatic updates: {line}" for line in lines]
    b.updater.stop()


@pytest.mark.parametrize("error", [NotUsable("v0.2.0 is not signed"), DownloadError("refused")])
def test_the_same_trouble_is_told_once(bench: Any, said: Any, error: Exception) -> None:
    b = bench()
    b.found = error
    b.begin()
    b.clock.pump([6 * 3600.0] * 5)
    assert len(b.looks) == 6
    assert said() == [f"no update: {error}"]
    b.found = NotUsable("something else")
    b.clock.advance(6 * 3600.0)
    assert len(said()) == 2
    b.updater.stop()


def test_an_error_of_the_program_itself_ends_nothing(bench: Any) -> None:
    events: list[Any] = []
    globalLogPublisher.addObserver(events.append)
    b = bench()
    b.found = ZeroDivisionError()
    b.begin()
    b.found = NothingNew("0.1.0")
    b.clock.advance(6 * 3600.0)
    globalLogPublisher.removeObserver(events.append)
    assert len(b.looks) == 2
    assert [event["log_failure"].type for event in events if "log_failure" in event] == [
        ZeroDivisionError
    ]
    b.updater.stop()


def test_a_slow_look_is_not_begun_again_and_ends_with_the_service(bench: Any) -> None:
    b = bench()
    cancelled: list[Any] = []
    b.found = Deferred(cancelled.append)
    b.begin()
    b.clock.pump([6 * 3600.0] * 3)
    assert len(b.looks) == 1
    b.updater.stop()
    assert len(cancelled) == 1 and b.clock.getDelayedCalls() == []


def test_settings_that_change_are_looked_at_at_once(bench: Any, said: Any) -> None:
    b = bench(auto_update=False)
    b.begin()
    b.updater.configure(attrs.evolve(b.config, job_timeout=1.0))
    b.clock.advance(0)
    assert b.looks == []
    b.found = NothingNew("0.1.0")
    b.updater.configure(attrs.evolve(b.config, auto_update=True, update_interval=60.0))
    b.clock.advance(0)
    assert len(b.looks) == 1
    b.clock.advance(60.0)
    assert len(b.looks) == 2
    b.updater.stop()


@pytest.mark.parametrize("how", ["runs", "is stopped", "dies"])
def test_when_a_version_counts_as_up(bench: Any, how: str) -> None:
    b = bench(version="0.1.0", auto_update=False)
    layout = b.layout
    with layout.staging() as folder:
        (folder / "x" / "turnstile").mkdir(parents=True)
        layout.put_in_place(folder / "x", "0.2.0")
    b.updater._program = Program("0.2.0", layout, True)
    b.updater.came_up()
    b.clock.advance(CONFIRM_AFTER / 2)
    assert layout.on_trial == "0.2.0"
    if how == "runs":
        b.clock.advance(CONFIRM_AFTER)
    elif how == "is stopped":
        b.updater.stop()
    assert layout.on_trial == ("0.2.0" if how == "dies" else None)
    b.updater.stop()


def test_one_that_did_not_come_up_is_not_confirmed_by_its_stop(bench: Any) -> None:
    b = bench()
    layout = b.layout
    with layout.staging() as folder:
        (folder / "x" / "turnstile").mkdir(parents=True)
        layout.put_in_place(folder / "x", "0.2.0")
    b.updater._program = Program("0.2.0", layout, True)
    b.updater.stop()
    assert layout.on_trial == "0.2.0"


@pytest_twisted.ensureDeferred
async def test_two_updates_at_once(tmp_path: Path) -> None:
    layout = make_installation(tmp_path)
    with layout.lock(), pytest.raises(NotUsable, match="another update is under way"):
        await install_update(reactor, layout, "0.2.0", make_wheel("0.2.0"))
    assert layout.current == "0.1.0"
    await install_update(reactor, layout, "0.2.0", make_wheel("0.2.0"))
    assert layout.current == "0.2.0"
