"""Registers ``twistd turnstile``; everything else is imported when it runs."""

from twisted.application.service import ServiceMaker

turnstile = ServiceMaker(
    "turnstile",
    "turnstile.tap",
    "Let several GPU engines share one card, one at a time.",
    "turnstile",
)
