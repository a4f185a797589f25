"""A turnstile that is a process of its own, as twistd runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import treq
from system_kit import AGENT, tick, until

import turnstile
from turnstile import config

ROOT = Path(turnstile.__file__).parent.parent


class Program:
    """A twistd of its own."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        names = {n for setting in config.SETTINGS for n in (setting.env, *setting.env_aliases)}
        kept = {name: value for name, value in os.environ.items() if name not in names}
        self.log = folder / "stderr.txt"
        command = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "-n", "--pidfile=", "turnstile", "--config=/dev/null", *options],
                cwd=folder,
                env={
                    **kept,
                    "PYTHONPATH": str(ROOT),
                    "PYTHONWARNINGS": "ignore",
                    "LISTEN_OLLAMA": "127.0.0.1:0",
                    "LISTEN_COMFY": "127.0.0.1:0",
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def lines(self, file: Path | None = None) -> list[str]:
        """The log so far."""
        return (file or self.log).read_text().splitlines() if (file or self.log).exists() else []

    async def port(self, name: str, file: Path | None = None) -> int:
        """Where a listener is."""

        def find() -> int:
            for line in self.lines(file):
                found = re.search(rf"{name} listens on .*?(\d+)\)", line)
                if found:
                    return int(found[1])
            assert self.process.poll() is None, self.lines(file)
            return 0

        port: int = await until(find, f"the port of {name}", 20.0, 0.02)
        return port

    async def ended(self, seconds: float = 10.0) -> int:
        """The exit status."""
        await until(lambda: self.process.poll() is not None, "the end", seconds, 0.01)
        return self.process.returncode

    async def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            await self.ended()


async def post(port: int, path: str, body: Any, **headers: str) -> Any:
    response = await treq.post(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        agent=AGENT,
    )
    content = await response.content()
    await tick()
    return response.code, content
