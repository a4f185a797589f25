"""A simulated GPU host with turnstile in front of it, to look at and to try clients on."""
