"""Signed updates of an installation that ``turnstile-service`` made: found, checked, put in place, taken back."""
