"""What the forge's workflow runs is there; a development version never comes from it."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".gitea" / "workflows" / "ci.yml"
pytestmark = pytest.mark.skipif(not WORKFLOW.exists(), reason="not a checkout")


def test_scripts_are_there():
    named = set(re.findall(r"(?:\.ci|script)/[a-z-]+", WORKFLOW.read_text()))
    assert {".ci/run", "script/test-oldest", "script/release", "script/build-deb"} <= named
    for name in named:
        assert os.access(ROOT / name, os.X_OK), name


def test_releases_are_made_of_version_tags_only():
    text = WORKFLOW.read_text()
    jobs = dict(
        re.findall(r"(?ms)^  ([a-z]+):\n(.*?)(?=^  [a-z]+:\n|\Z)", text.split("\njobs:\n")[1])
    )
    assert set(jobs) == {"test", "oldest", "release", "image"}
    for name in ("release", "image"):
        assert "if: startsWith(github.ref, 'refs/tags/v')" in jobs[name]
        assert "needs: [test, oldest]" in jobs[name]
        (pattern,) = re.findall(r"grep -Eqx '(.*)'", jobs[name])
        for tag in ("v1.2.3", "v0.10.0"):
            assert re.fullmatch(pattern, tag)
        for tag in ("v1.2", "v1.2.3-rc1", "v01.2.3", "1.2.3", "v1.2.3.4"):
            assert not re.fullmatch(pattern, tag)
    assert "RELEASE_SIGNING_KEY" not in jobs["test"] + jobs["oldest"] + jobs["image"]
