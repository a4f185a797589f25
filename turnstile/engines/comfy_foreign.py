"""Jobs in ComfyUI's queue that did not come through turnstile: getting the card for them."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, ArbiterClosed, Lease, Tenant
from turnstile.card import Card

#: The degraded interval of a job that turnstile did not let in while others have the card.
BESIDE = "foreign job runs beside other models"


class Adoption:
    """The place in the line of jobs that run already.

    :param tenant: ComfyUI.
    :param adopted: is given the lease, which is its own to release.
    """

    log = Logger()

    def __init__(
        self, arbiter: Arbiter, card: Card, tenant: Tenant, adopted: Callable[[Lease], None]
    ) -> None:
        self._arbiter = arbiter
        self._card = card
        self._tenant = tenant
        self._adopted = adopted
        self._waiting: Deferred[Lease] | None = None

    @property
    def asked(self) -> bool:
        """Whether the lease was asked for and not had yet."""
        return self._waiting is not None

    def ask(self, ids: frozenset[str], *, alone: bool) -> None:
        """Get in line, unless that was done.

        :param alone: whether no job of ours has the card.
        """
        if self._waiting is not None:
            return
        name = self._tenant.name
        self._card.mark_resident(name)
        if alone and self._card.resident != {name}:
            self._card.degrade(name, BESIDE)
        self.log.info(
            "ComfyUI has jobs that did not come through turnstile",
            prompt_ids=", ".join(sorted(ids)),
        )
        self._waiting = d = self._arbiter.acquire(self._tenant, "foreign job")
        d.addCallbacks(self._granted, self._refused)

    def cancel(self) -> None:
        """They are over: leave the line."""
        if self._waiting is not None:
            self._waiting.cancel()

    def _granted(self, lease: Lease) -> None:
        self._waiting = None
        # Marked anew: it may have been evicted while it waited.
        self._card.mark_resident(self._tenant.name)
        room = self._card.make_room(self._tenant)
        if room is None:
            self._restore()
        else:
            room.addBoth(self._restore)
        self._adopted(lease)

    def _refused(self, failure: Failure) -> None:
        self._waiting = None
        # The interval stays open until their models are gone too.
        failure.trap(CancelledError, ArbiterClosed)

    def _restore(self, _: object = None) -> None:
        self._card.restore(self._tenant.name, BESIDE)
