"""The systemd units that a configuration asks for: the service, and a socket for each engine that keeps its own port.

``python -m turnstile.units [FILE]`` prints their names, for those who install the service.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from turnstile.config import SETTINGS, Config, ConfigError, load

SERVICE = "turnstile.service"
#: By the setting that says where the listener is.
SOCKETS: Mapping[str, str] = {
    "LISTEN_OLLAMA": "turnstile-ollama.socket",
    "LISTEN_COMFY": "turnstile-comfy.socket",
}
_DEFAULTS = {setting.env: setting.parse(setting.default) for setting in SETTINGS}


def wanted_units(config: Config) -> list[str]:
    """Names of the units to enable. A listener that was put elsewhere has no socket, turnstile opens it itself."""
    sockets = [
        SOCKETS[name]
        for name, endpoint in config.listeners()
        if name in SOCKETS and endpoint == _DEFAULTS[name]
    ]
    return [*sockets, SERVICE]


def main(arguments: list[str]) -> str:
    """The names for a configuration file; raises SystemExit with one line if it can't be used.

    The environment does not count: it is not the service's.
    """
    try:
        config = load({"config": arguments[0] if arguments else None}, {})
    except ConfigError as error:
        raise SystemExit(f"turnstile: {error}") from None
    return "".join(f"{name}\n" for name in wanted_units(config))


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
