"""Runs inside.py in mount and process name spaces of its own, so that nothing of it is left however it ends.

It is told to come to an end by the end of a pipe: at Ctrl-C, at SIGTERM, or if this process is gone.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: Seconds for an orderly end.
PATIENCE = 30


def main() -> int:
    inside = Path(__file__).parent / "inside.py"
    watched, held = os.pipe()
    work = tempfile.mkdtemp(prefix="turnstile-test-deb-")
    has_shell = "--shell" in sys.argv
    child = subprocess.Popen(
        [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-B", str(inside), f"--lifeline={watched}", f"--work={work}"),
            *sys.argv[1:],
        ],
        pass_fds=[watched],
        # Ctrl-C is for us alone; but a shell wants its terminal.
        start_new_session=not has_shell,
    )
    os.close(watched)
    told = False

    def end(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            os.close(held)
            signal.alarm(PATIENCE)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN if has_shell else end)
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    try:
        status = child.wait()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
