"""The card's bookkeeping."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from turnstile.sim import GIB, Card, OutOfVram


def test_overlap_is_the_time_in_which_two_owners_hold_memory() -> None:
    clock = Clock()
    card = Card(clock)
    card.allocate("a", "model", GIB)
    clock.advance(1)
    card.allocate("b", "model", 2 * GIB)
    clock.advance(1)
    assert card.overlaps[-1].end is None
    card.allocate("a", "model", 0)
    clock.advance(1)
    card.allocate("b", "more", GIB)
    card.release("b")
    assert [(span.start, span.end, span.owners, span.peak) for span in card.overlaps] == [
        (1.0, 2.0, {"a", "b"}, 3 * GIB)
    ]
    assert card.used == 0 and card.free == 16 * GIB
    assert card.history[0] == (0.0, {"a": GIB})


def test_touching_tenancies_do_not_overlap() -> None:
    card = Card(Clock())
    card.allocate("a", "x", 1)
    card.release("a")
    card.allocate("b", "x", 1)
    assert card.overlaps == [] and card.residents == {"b": 1}


def test_a_full_card_pages_or_raises() -> None:
    card = Card(Clock(), 4 * GIB)
    card.allocate("a", "x", 5 * GIB)
    assert len(card.over_committed) == 1 and card.free == 0
    card.release("a", "x")
    assert card.over_committed[0].end == 0.0
    strict = Card(Clock(), 4 * GIB, on_full="raise")
    strict.allocate("a", "x", 3 * GIB)
    with pytest.raises(OutOfVram):
        strict.allocate("b", "x", 2 * GIB)
    assert strict.residents == {"a": 3 * GIB} and strict.overlaps == []
    strict.allocate("a", "x", GIB)
    assert strict.used == GIB


def test_base_bytes_count_once_an_owner() -> None:
    card = Card(Clock(), base_bytes=100)
    card.allocate("a", "x", 1)
    card.allocate("a", "y", 1)
    assert card.used == 102
    card.release("a")
    assert card.used == 0


def test_listeners_hear_changes_until_taken_off() -> None:
    card = Card(Clock())
    heard: list[int] = []
    off = card.listen(lambda changed: heard.append(changed.used))
    card.allocate("a", "x", 5)
    card.allocate("a", "x", 5)
    off()
    card.release("a")
    assert heard == [5]
    with pytest.raises(ValueError):
        card.allocate("a", "x", -1)
