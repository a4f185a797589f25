"""``turnstile-pace`` as a file to be run: whoever starts it need not know where another Python finds turnstile."""

import os
import sys

if __name__ == "__main__":
    # At the end: what lies beside turnstile must not hide modules of Python's own.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from turnstile.gpushare.pace_command import main

    sys.exit(main())
