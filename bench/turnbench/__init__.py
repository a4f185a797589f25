"""The benchmark: turnstile beside other proxies, measured in one run on one machine."""
