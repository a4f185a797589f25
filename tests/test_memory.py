"""A real turnstile process stays small while much goes through it (``script/check-memory`` does so with 2 GiB)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from memory_kit import MIB, TRANSFERS, Bench, Peak, memory


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_flat_while_256_mib_go_through_each_way(tmp_path: Path) -> None:
    with Bench(tmp_path).running() as bench:
        assert memory(bench.pid) < 150 * MIB
        for kind in TRANSFERS:
            with Peak(bench.pid) as peak:
                bench.transfer(kind, 256 * MIB)
            assert peak.growth < 32 * MIB, f"{kind}: grew by {peak.growth / MIB:.1f} MiB"
