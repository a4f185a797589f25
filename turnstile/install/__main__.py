"""``python -m turnstile.install``: the command ``turnstile-service``."""

from turnstile.install.cli import main

if __name__ == "__main__":
    main()
