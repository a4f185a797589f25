"""Updates, part by part: versions, what a forge says, signatures, wheels, trials."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from release_kit import KEY, OTHER_KEY, make_root, make_wheel, public_pem

from turnstile.update import boot, pubkey, wheel
from turnstile.update.layout import Layout
from turnstile.update.release import (
    Asset,
    NothingNew,
    NotUsable,
    Release,
    Repository,
    choose_files,
    judge,
    parse_release,
)
from turnstile.update.signature import check_checksum, check_signature, load_keys
from turnstile.update.version import Version

numbers = st.integers(0, 999_999_999)
versions = st.builds(Version, numbers, numbers, numbers)


# -- versions


@given(versions)
def test_a_version_is_what_its_text_says(version: Version) -> None:
    assert Version.parse(str(version)) == version
    assert Version.parse_tag(f"v{version}") == version
    assert Version.parse_tag(str(version)) is None


@given(versions, versions)
def test_the_order_is_that_of_the_numbers(one: Version, other: Version) -> None:
    key = [tuple(map(int, str(version).split("."))) for version in (one, other)]
    assert (one < other) is (key[0] < key[1])
    assert (one == other) is (key[0] == key[1])


@given(st.text(st.sampled_from("0123456789.v+-ab \n٣²"), max_size=12))
def test_nothing_else_is_a_version(text: str) -> None:
    version = Version.parse(text)
    assert version is None or str(version) == text


@pytest.mark.parametrize(
    "text",
    ["", "1", "1.2", "1.2.3.4", "01.2.3", "1.2.3rc1", "1.2.3.dev4+g0", "v1.2.3", "1.2.3\n", "1.2.٣",
     "0+checkout", "1.2.1000000000", "-1.2.3", "1..3"],
)  # fmt: skip
def test_development_versions_and_nonsense(text: str) -> None:
    assert Version.parse(text) is None


# -- repositories


@pytest.mark.parametrize(
    ("url", "clean", "api"),
    [
        ("https://git.example/o/r", "https://git.example/o/r",
         "https://git.example/api/v1/repos/o/r/releases/latest"),
        ("https://git.example:8443/o/r.git/", "https://git.example:8443/o/r",
         "https://git.example:8443/api/v1/repos/o/r/releases/latest"),
        ("https://example.com/git/o/r", "https://example.com/git/o/r",
         "https://example.com/git/api/v1/repos/o/r/releases/latest"),
        ("https://github.com/o/r", "https://github.com/o/r",
         "https://api.github.com/repos/o/r/releases/latest"),
        ("HTTPS://[::1]:3000/o/r", "https://[::1]:3000/o/r",
         "https://[::1]:3000/api/v1/repos/o/r/releases/latest"),
    ],
)  # fmt: skip
def test_where_the_latest_release_is_described(url: str, clean: str, api: str) -> None:
    repository = Repository.parse(url)
    assert (str(repository), repository.api) == (clean, api)
    assert Repository.parse(str(repository)) == repository


@pytest.mark.parametrize(
    "url",
    ["", "x", "http://a/b/c", "https://a", "https://a/b", "https:///b/c", "https://u:p@a/b/c",
     "https://a/b/c?x", "https://a/b/c#x", "https://a:x/b/c", "https://a/b /c", "https://a/b/ü",
     "https://a/b/c%2fd", "file:///b/c", "https://a/b/c\n"],
)  # fmt: skip
def test_what_is_no_repository(url: str) -> None:
    with pytest.raises(ValueError):
        Repository.parse(url)


# -- what a forge says


GITEA = {
    "id": 3,
    "tag_name": "v0.2.0",
    "draft": False,
    "prerelease": False,
    "assets": [
        {"name": "a.whl", "size": 7, "browser_download_url": "https://x/a.whl", "uuid": "…"},
        {"name": "broken"},
        "nonsense",
        {"name": "b", "size": "7", "browser_download_url": "https://x/b"},
    ],
}


def test_an_answer() -> None:
    release = parse_release(json.dumps(GITEA).encode())
    assets = (Asset("a.whl", "https://x/a.whl", 7), Asset("b", "https://x/b", None))
    assert release == Release("v0.2.0", assets)
    assert release.version == Version(0, 2, 0)
    for flag in ("draft", "prerelease"):
        assert parse_release(json.dumps({**GITEA, flag: True}).encode()).unfinished


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"tag_name": 3}', b"[" * 100_000])
def test_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(NotUsable):
        parse_release(body)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["tag_name", "assets", "name", "size", "browser_download_url", "draft"]),
        inner, max_size=4,
    ),
))  # fmt: skip
def test_any_answer_is_understood_or_refused(answer: Any) -> None:
    try:
        release = parse_release(json.dumps(answer).encode())
    except NotUsable:
        return
    assert isinstance(release.tag, str)
    with pytest.raises((NotUsable, NothingNew)):
        judge("0.0.0", release, frozenset())
        choose_files(release, "*.whl")


def release_with(*names: str) -> Release:
    return Release("v0.2.0", tuple(Asset(name, f"https://x/{name}") for name in names))


def test_the_files_of_a_release() -> None:
    files = choose_files(
        release_with("x.sdist", "t-1.whl", "t-1.whl.sig", "t-1.whl.sha256"), "t-*.whl"
    )
    assert files.wheel.name == "t-1.whl"
    assert files.signature.name == "t-1.whl.sig"
    assert files.checksum is not None and files.checksum.name == "t-1.whl.sha256"
    assert choose_files(release_with("t-1.whl", "t-1.whl.sig"), "t-*.whl").checksum is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "v0.2.0 should have one file named t-*.whl (it has: none)"),
        (
            ("t-2.whl", "t-1.whl"),
            "v0.2.0 should have one file named t-*.whl (it has: t-1.whl, t-2.whl)",
        ),
        (("t-1.whl",), "v0.2.0 is not signed: it has no t-1.whl.sig"),
        (("t-1.whl", "other.sig"), "v0.2.0 is not signed: it has no t-1.whl.sig"),
    ],
)
def test_files_that_are_not_there(names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(NotUsable) as caught:
        choose_files(release_with(*names), "t-*.whl")
    assert str(caught.value) == reason


@given(versions, versions)
def test_only_newer_versions_are_installed(running: Version, latest: Version) -> None:
    release = Release(f"v{latest}")
    try:
        chosen = judge(str(running), release, frozenset())
    except NothingNew as nothing:
        assert running == latest == nothing.version
    except NotUsable as error:
        assert latest < running and "older" in str(error)
    else:
        assert chosen == latest and latest > running
        with pytest.raises(NotUsable, match="did not come up"):
            judge(str(running), release, frozenset({str(latest)}))


@pytest.mark.parametrize(
    ("running", "release", "reason"),
    [
        ("0.1.0.dev3+g1", Release("v9.9.9"), "0.1.0.dev3+g1 is a development version"),
        ("0+checkout", Release("v9.9.9"), "0+checkout is a development version"),
        ("0.1.0", Release("9.9.9"), "the latest release, '9.9.9', is not named vX.Y.Z"),
        ("0.1.0", Release("v9.9.9-rc1"), "is not named vX.Y.Z"),
        ("0.1.0", Release("nightly"), "is not named vX.Y.Z"),
        ("0.1.0", Release("v9.9.9", (), True), "v9.9.9 is a draft or a pre-release"),
    ],
)
def test_what_is_never_installed(running: str, release: Release, reason: str) -> None:
    with pytest.raises(NotUsable) as caught:
        judge(running, release, frozenset())
    assert reason in str(caught.value)


# -- signatures


def test_no_key_is_embedded() -> None:
    assert pubkey.PUBLIC_KEYS == ()


def test_signatures() -> None:
    (key,) = load_keys([public_pem()])
    data = b"wheel"
    check_signature(data, KEY.sign(data), [key])
    check_signature(data, OTHER_KEY.sign(data), load_keys([public_pem(), public_pem(OTHER_KEY)]))
    for bad in (OTHER_KEY.sign(data), KEY.sign(data + b"x"), bytes(64)):
        with pytest.raises(NotUsable, match="is not its publisher's"):
            check_signature(data, bad, [key])
    for short in (b"", KEY.sign(data)[:-1], KEY.sign(data) + b"\n"):
        with pytest.raises(NotUsable, match="bytes instead of 64"):
            check_signature(data, short, [key])
    with pytest.raises(NotUsable, match="is not its publisher's"):
        check_signature(data, KEY.sign(data), [])


@given(st.integers(0, 8 * 64 - 1), st.integers(0, 8 * 300 - 1))
def test_every_changed_bit_is_noticed(in_signature: int, in_data: int) -> None:
    (key,) = load_keys([public_pem()])
    data, signature = bytes(300), KEY.sign(bytes(300))

    def flip(what: bytes, bit: int) -> bytes:
        changed = bytearray(what)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    for one, other in ((data, flip(signature, in_signature)), (flip(data, in_data), signature)):
        with pytest.raises(NotUsable):
            check_signature(one, other, [key])


RSA = """-----BEGIN PUBLIC KEY-----
MFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAKj34GkxFhD90vcNLYLInFEX6Ppy1tPf
9Cnzj4p4WGeKLs1Pt8QuKUpRKfFLfRYC9AIKjbJTWit+CqvjWYzvQwECAwEAAQ==
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize("text", ["", "nonsense", RSA, public_pem()[:60]])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="public key for updates"):
        load_keys([text])


def test_checksums() -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    for text in (digest, digest.upper(), f"{digest}  name.whl\n", f" {digest}\n"):
        check_checksum(b"x", text.encode())
    with pytest.raises(NotUsable, match="damaged"):
        check_checksum(b"y", digest.encode())
    for text in ("", "x" * 64, digest[:-1], f"{digest}0"):
        with pytest.raises(NotUsable, match="no checksum"):
            check_checksum(b"x", text.encode())


# -- wheels


def installed(name: str) -> str | None:
    return {"attrs": "23.1.0", "twisted": "24.7.0.post0", "odd": "1!2.3rc1"}.get(name)


def check(data: bytes, version: str = "0.2.0", python: str = "3.11.7") -> None:
    wheel.check_metadata(wheel.read_metadata(data), version, python, installed)


def test_a_wheel_that_fits() -> None:
    check(make_wheel())
    check(make_wheel(requires=("twisted[tls]>=22.4", "attrs (>=22.2,<24)", "odd>=2.3", "attrs")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "other"}, "it is the program 'other'"),
        ({"version": "0.1.9"}, "it says that it is version '0.1.9', not 0.2.0"),
        ({"python": ">=3.12"}, "it needs Python >=3.12"),
        ({"python": "~=3.11"}, "its requirement 'Requires-Python' is not understood"),
        ({"requires": ("nobody",)}, "it needs nobody (not installed here): install it with"),
        ({"requires": ("attrs>=23.2",)}, "it needs attrs >=23.2 (23.1.0 here): install it with"),
        ({"requires": ("attrs<23.1",)}, "it needs attrs <23.1 (23.1.0 here)"),
        ({"requires": ("attrs!=23.1",)}, "it needs attrs !=23.1"),
        ({"requires": ("attrs==23.1.1",)}, "it needs attrs ==23.1.1"),
        ({"requires": ("attrs~=23.1",)}, "'attrs~=23.1' is not understood"),
        ({"requires": ("attrs @ https://x/y",)}, "is not understood"),
        ({"requires": ('attrs; python_version < "4"',)}, "is not understood"),
        ({"requires": ('attrs; extra == "x" or True',)}, "is not understood"),
        ({"requires": ("-attrs",)}, "is not understood"),
    ],
)
def test_wheels_that_do_not_fit(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotUsable) as caught:
        check(make_wheel(**options))
    assert reason in str(caught.value)


def test_what_is_installed_here() -> None:
    assert wheel.installed_version("attrs")
    assert wheel.installed_version("no-such-distribution") is None


@pytest.mark.parametrize("data", [b"", b"PK", make_wheel()[:-30], make_wheel()[:200], b"\0" * 1000])
def test_what_is_no_wheel(data: bytes) -> None:
    with pytest.raises(NotUsable):
        wheel.read_metadata(data)


def test_a_wheel_without_metadata(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("turnstile/__init__.py", "")
    with pytest.raises(NotUsable, match="no metadata"):
        wheel.read_metadata(out.getvalue())


def test_unpacking(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    wheel.unpack(make_wheel(files={"turnstile/engines/a.py": "A = 1\n"}), target)
    wheel.sync(target)
    assert (target / "turnstile/engines/a.py").read_text() == "A = 1\n"
    assert sorted(path.name for path in target.iterdir()) == [
        "turnstile",
        "turnstile-0.2.0.dist-info",
        "twisted",
    ]


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "turnstile/../../x", "x.pth", "other/x", "twisted/internet/reactor.py",
     "turnstile\\x", "turnstile", "twisted/x.py", "turnstile-1.data/scripts/x"],
)  # fmt: skip
def test_wheels_that_want_to_be_elsewhere(tmp_path: Path, name: str) -> None:
    target = tmp_path / "deep" / "x"
    target.mkdir(parents=True)
    with pytest.raises(NotUsable, match="holds something odd"):
        wheel.unpack(make_wheel(files={name: "x"}), target)
    outside = [path for path in tmp_path.rglob("*") if target not in (path, *path.parents)]
    assert outside == [tmp_path / "deep"]


def odd_wheel(**more: Any) -> bytes:
    out = io.BytesIO(make_wheel())
    with zipfile.ZipFile(out, "a") as archive:
        info = zipfile.ZipInfo("turnstile/link")
        for name, value in more.items():
            setattr(info, name, value)
        archive.writestr(info, "/etc/passwd")
    return out.getvalue()


def test_links_and_doubles(tmp_path: Path) -> None:
    with pytest.raises(NotUsable, match="holds something odd: 'turnstile/link'"):
        wheel.unpack(odd_wheel(external_attr=0o120777 << 16), tmp_path)
    (tmp_path / "x").mkdir()
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = odd_wheel(filename="turnstile/tap.py")
    with pytest.raises(NotUsable, match=r"holds something odd: 'turnstile/tap\.py'"):
        wheel.unpack(data, tmp_path / "x")


def test_wheels_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "LARGEST_UNPACKED", 100_000)
    data = make_wheel(files={"turnstile/zeros": bytes(200_000)})
    assert len(data) < 10_000
    with pytest.raises(NotUsable, match="unpacks to more than"):
        wheel.unpack(data, tmp_path)
    # One that lies about it.
    claimed = data.replace((200_000).to_bytes(4, "little"), (50_000).to_bytes(4, "little"))
    assert claimed != data
    with pytest.raises(NotUsable, match="it is damaged"):
        wheel.unpack(claimed, tmp_path)
    monkeypatch.setattr(wheel, "MOST_FILES", 3)
    with pytest.raises(NotUsable, match="more than 3 files"):
        wheel.unpack(make_wheel(), tmp_path)


def test_a_wheel_with_a_damaged_file(tmp_path: Path) -> None:
    data = bytearray(make_wheel(files={"turnstile/big": os.urandom(1000)}))
    at = data.index(b"turnstile/big") + 200
    data[at] ^= 0xFF
    with pytest.raises(NotUsable, match="it is damaged"):
        wheel.unpack(bytes(data), tmp_path)


# -- trials


def start(root: Path, *, comes_up: bool = False) -> tuple[str | None, str | None]:
    """One start: what ran, and what the program before it said."""
    said = boot.prepare(root)
    version = boot.current_version(root)
    if comes_up and version is not None:
        Layout(root).confirm(version, pytest.fail)
    return version, said


def stage(root: Path, version: str) -> Layout:
    layout = Layout(root)
    with layout.staging() as folder:
        (folder / "x" / "turnstile").mkdir(parents=True)
        layout.put_in_place(folder / "x", version)
    return layout


def listing(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "releases").iterdir())


def test_a_version_that_comes_up_stays(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0", "0.0.9")
    layout = stage(root, "0.2.0")
    assert (layout.current, layout.on_trial, layout.previous) == ("0.2.0", "0.2.0", "0.1.0")
    assert start(root, comes_up=True) == ("0.2.0", None)
    for _ in range(5):
        assert start(root) == ("0.2.0", None)
    assert layout.on_trial is None
    assert listing(root) == ["0.1.0", "0.2.0"]  # the one before is kept, older ones are not
    assert sorted(path.name for path in root.iterdir()) == ["current", "releases", "update.json"]


def test_a_version_that_fails_twice_is_taken_back(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    layout = stage(root, "0.2.0")
    assert start(root) == ("0.2.0", None)
    assert start(root) == ("0.2.0", None)
    assert start(root) == ("0.1.0", "version 0.2.0 did not come up 2 times: back to 0.1.0")
    assert layout.refused == {"0.2.0"} and layout.on_trial is None
    for _ in range(3):
        assert start(root) == ("0.1.0", None)
    # Unless somebody insists.
    stage(root, "0.2.0")
    assert layout.refused == frozenset()
    assert start(root, comes_up=True) == ("0.2.0", None)


def test_a_second_chance_is_enough(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    stage(root, "0.2.0")
    assert start(root) == ("0.2.0", None)
    assert start(root, comes_up=True) == ("0.2.0", None)
    assert start(root) == ("0.2.0", None)


def test_one_update_after_the_other(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    for number in range(2, 6):
        stage(root, f"0.{number}.0")
        assert start(root, comes_up=True) == (f"0.{number}.0", None)
        assert listing(root) == [f"0.{number - 1}.0", f"0.{number}.0"]


def test_what_cannot_be_removed_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path, "0.1.0", "0.0.9")
    layout = stage(root, "0.2.0")

    def refuse(path: Any, **more: Any) -> None:
        raise PermissionError(1, "no", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    said: list[str] = []
    assert layout.confirm("0.2.0", said.append)
    assert said == [f"{root}/releases/0.0.9 could not be removed: no"]


@pytest.mark.parametrize("at", ["write", "switch"])
def test_an_update_that_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The power fails between two steps: whatever runs next is a version that was there before, or is on trial."""
    root = make_root(tmp_path, "0.1.0")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(boot, "write_state" if at == "write" else "switch", fail)
        with pytest.raises(KeyboardInterrupt):
            stage(root, "0.2.0")
    assert start(root) == ("0.1.0", None)
    assert Layout(root).on_trial is None


@pytest.mark.parametrize("at", ["write", "switch"])
def test_a_way_back_that_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    root = make_root(tmp_path, "0.1.0")
    stage(root, "0.2.0")
    start(root)
    start(root)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(boot, "write_state" if at == "write" else "switch", fail)
        with pytest.raises(KeyboardInterrupt):
            boot.prepare(root)
    assert start(root)[0] == "0.1.0"


def test_the_last_version_is_not_taken_back(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    stage(root, "0.2.0")
    start(root)
    start(root)
    (root / "releases/0.1.0").rename(root / "gone")
    version, said = start(root)
    assert version == "0.2.0"
    assert said == "version 0.2.0 does not come up, and there is none to go back to"


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    stage(root, "0.2.0")
    start(root, comes_up=True)
    (root / "current").unlink()
    assert start(root) == ("0.1.0", "no version is in place: back to 0.1.0")
    (root / "current").unlink()
    (root / "current").symlink_to("/etc")
    assert start(root)[0] == "0.1.0"


@pytest.mark.parametrize(
    "state",
    ["", "nonsense", "[]", "null", '{"version": "../..", "previous": 3, "attempts": "x"}',
     '{"refused": [1, "../x", "0.3.0"]}'],
)  # fmt: skip
def test_a_state_that_cannot_be_read(tmp_path: Path, state: str) -> None:
    root = make_root(tmp_path, "0.1.0")
    (root / "update.json").write_text(state)
    assert start(root) == ("0.1.0", None)
    assert Layout(root).refused <= {"0.3.0"}
    stage(root, "0.2.0")
    assert start(root, comes_up=True) == ("0.2.0", None)


@given(st.lists(st.sampled_from(["start", "good start", "stage", "bad state"]), max_size=12))
def test_whatever_happens_a_version_runs(tmp_path_factory: Any, steps: list[str]) -> None:
    root = make_root(tmp_path_factory.mktemp("x"), "0.0.0")
    last = good = 0
    for step in steps:
        if step == "stage":
            last += 1
            stage(root, f"0.{last}.0")
        elif step == "bad state":
            (root / "update.json").write_text("{")
        else:
            version, _ = start(root, comes_up=step == "good start")
            assert version is not None and boot.has_release(root, version)
            assert int(version.split(".")[1]) >= good - 1
            if step == "good start":
                good = int(version.split(".")[1])


def test_the_program_that_runs_before_the_start(tmp_path: Path) -> None:
    """As systemd runs it: with nothing but Python, from a copy."""
    root = make_root(tmp_path, "0.1.0")
    stage(root, "0.2.0")
    copy = root / "boot.py"
    copy.write_bytes(Path(boot.__file__).read_bytes())

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(copy), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run(str(root)) == run(str(root)) == ""
    assert run(str(root)) == "turnstile: version 0.2.0 did not come up 2 times: back to 0.1.0\n"
    assert os.readlink(root / "current") == "releases/0.1.0"
    # Nothing keeps the service from being started.
    assert run().startswith("turnstile: the versions could not be looked at: IndexError")
    (root / "update.json").unlink()
    (root / "update.json").mkdir()
    assert "can't be read" in run(str(root))


def test_installations_that_are_not_ours_are_not_found(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0.1.0")
    package = root / "releases/0.1.0/turnstile"
    assert Layout.find(package, root / "venv") is None
    (root / "venv").mkdir()
    found = Layout.find(package, root / "venv")
    assert found == Layout(root)
    assert found.python == root / "venv/bin/python"
    assert Layout.find(package, tmp_path) is None
    assert Layout.find(Path("/usr/lib/python3/dist-packages/turnstile"), Path("/usr")) is None
    assert Layout.find(Path("/turnstile"), Path("/usr")) is None
    (root / "current").unlink()
    assert Layout.find(package, root / "venv") is None
