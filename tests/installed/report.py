"""One line for each check, and the count at the end."""

import time
import traceback
from collections.abc import Callable

from machine import Failed


class Report:
    """Runs checks and tells what each saw."""

    def __init__(self, only: str = "") -> None:
        self._only = only
        self._began = time.monotonic()
        self.passed = 0
        self.failed = 0

    def section(self, title: str) -> None:
        """A heading."""
        print(f"\n{title} ({time.monotonic() - self._began:.0f} s)", flush=True)

    def check(
        self, what: str, look: Callable[[], str | None], on_failure: Callable[[], str] | None = None
    ) -> bool:
        """Whether ``look``, which says what it saw, raises nothing."""
        try:
            seen = look() or "yes"
        except Failed as error:
            self.failed += 1
            print(f"  FAIL  {what}: {str(error)[-1500:]}", flush=True)
        except Exception:
            self.failed += 1
            print(f"  FAIL  {what}:\n{traceback.format_exc()}", flush=True)
        else:
            self.passed += 1
            print(f"  ok    {what}: {seen}", flush=True)
            return True
        if on_failure is not None:
            try:
                print(
                    "        | " + "\n        | ".join(on_failure().splitlines()[-25:]), flush=True
                )
            except Failed as error:
                print(f"        | {error}", flush=True)
        return False

    def close(self) -> bool:
        """Print the count; whether all is well."""
        print(f"\ntest-deb: took {time.monotonic() - self._began:.0f} s")
        print(f"test-deb: {self.passed} passed, {self.failed} failed", flush=True)
        return self.failed == 0 and self.passed > 0
