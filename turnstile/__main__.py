"""``turnstile``, ``python -m turnstile``: in the foreground, as ``twistd --nodaemon --pidfile= turnstile`` runs it."""

import sys

from twisted.scripts import twistd


def main() -> None:
    """Run twistd with our plugin; the command line's arguments are the plugin's own."""
    sys.argv = ["turnstile", "--nodaemon", "--pidfile=", "turnstile", *sys.argv[1:]]
    twistd.run()


if __name__ == "__main__":
    main()
