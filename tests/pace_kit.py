"""For the tests of turnstile-pace: a peer that leaves others little time, and programs that compute."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from turnstile.gpushare import Peer

#: Prints its own pid and its child's; both compute.
BURN = "sh -c 'while :; do :; done' & echo $$; echo $!; while :; do :; done"


@contextmanager
def rival(card: str) -> Iterator[Peer]:
    """A peer that computes without end."""
    over = threading.Event()
    with Peer.join(card, "rival", 1e6) as peer:

        def compute() -> None:
            while not over.wait(0.05):
                peer.touch()

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            yield peer
        finally:
            over.set()
            thread.join()


@contextmanager
def port() -> Iterator[int]:
    """One that a program can listen on, and nobody is given by chance."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
