"""``python -m turnstile.healthcheck``: whether turnstile answers, by its configuration; for a HEALTHCHECK.

Asks for ``/turnstile/healthz`` at the first listener that has a TCP port. Exits 0 if it answers 200, else 1 with a line
that says why.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Mapping

from turnstile.config import Config, ConfigError, load, split_endpoint

#: Seconds to wait for the answer.
PATIENCE = 3.0
_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class Unhealthy(Exception):
    """It does not answer as it should."""


def place(config: Config) -> tuple[str, int, bool]:
    """Host and port of a listener, and whether it speaks TLS; raises `Unhealthy` if none has a port."""
    for _, endpoint in config.listeners():
        kind, positional, named = split_endpoint(endpoint)
        port = int(positional[0] if positional else named.get("port", "0")) if kind != "unix" else 0
        if kind in ("tcp", "tcp6", "ssl") and port:
            interface = named.get("interface", "")
            host = "::1" if kind == "tcp6" and not interface else _LOCAL.get(interface, interface)
            return host, port, kind == "ssl"
    raise Unhealthy("no listener has a TCP port")


def check(environ: Mapping[str, str]) -> None:
    """Ask; raises `Unhealthy`."""
    try:
        host, port, tls = place(load({}, environ))
    except ConfigError as error:
        raise Unhealthy(str(error)) from None
    connection: http.client.HTTPConnection
    if tls:
        # It is this machine; whom its certificate names does not matter.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    try:
        connection.request("GET", "/turnstile/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Unhealthy(f"{host} port {port}: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if status != 200:
        raise Unhealthy(f"{host} port {port}: status {status}")


def main() -> None:
    """Exit with 0 or 1."""
    try:
        check(os.environ)
    except Unhealthy as error:
        raise SystemExit(f"turnstile: {error}") from None


if __name__ == "__main__":
    main()
