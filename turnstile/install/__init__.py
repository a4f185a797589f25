"""``turnstile-service``: makes turnstile a systemd service of a Linux machine, where no Debian package does."""
