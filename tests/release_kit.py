"""Releases to update to: a throw-away key, wheels signed with it, and a forge that offers them over TLS."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from twisted.internet import ssl
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def public_pem(key: Any = KEY) -> str:
    """A public key as pubkey.py holds it."""
    pem: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem.decode()


def make_wheel(
    version: str = "0.2.0",
    *,
    name: str = "turnstile",
    requires: tuple[str, ...] = ("attrs>=22.2", 'pytest>=8; extra == "tests"'),
    python: str = ">=3.11",
    files: Mapping[str, bytes | str] | None = None,
) -> bytes:
    """A wheel that is whole, and as small as can be; ``files`` come on top."""
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Requires-Python: {python}",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    content: dict[str, bytes | str] = {
        "turnstile/__init__.py": (
            "from importlib import metadata\n__version__ = metadata.version('turnstile')\n"
        ),
        "turnstile/service.py": "",
        "turnstile/tap.py": "",
        "twisted/plugins/turnstile_plugin.py": "",
        f"turnstile-{version}.dist-info/METADATA": "\n".join(metadata) + "\n",
        **(files or {}),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return out.getvalue()


class Certificates:
    """A certificate authority of its own, and a server's certificate by it."""

    def __init__(self, host: str = "localhost") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "turnstile tests' own")])
        self.authority = self._issue(self.name, self._key, [], True)
        self.pem = self.authority.public_bytes(serialization.Encoding.PEM)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        certificate = self._issue(subject, key, [x509.DNSName(host)], False)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.server_options = ssl.PrivateCertificate.loadPEM(secret + pem).options()

    def _issue(self, subject: Any, key: Any, names: list[Any], is_authority: bool) -> Any:
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def policy(self) -> Any:
        """Trusts this authority and no other."""
        trusted = ssl.trustRootFromCertificates([ssl.Certificate.loadPEM(self.pem)])
        return BrowserLikePolicyForHTTPS(trusted)


class _Leaf(Resource):
    isLeaf = True

    def __init__(self, forge: Forge) -> None:
        super().__init__()
        self._forge = forge

    def render_GET(self, request: Any) -> Any:
        return self._forge.answer(request)


class Forge:
    """Gitea's and GitHub's answers about the latest release of ``owner/turnstile``, and its files.

    What it offers is in :attr:`files`, and may be spoiled there.
    """

    def __init__(self, reactor: Any, certificates: Certificates) -> None:
        site = Site(_Leaf(self))
        site.noisy = False
        self._port = reactor.listenSSL(0, site, certificates.server_options, interface="127.0.0.1")
        self.url = f"https://localhost:{self._port.getHost().port}"
        self.repository = f"{self.url}/owner/turnstile"
        self.files: dict[str, bytes] = {}
        self.latest: dict[str, Any] | None = None
        #: What is sent in place of a file, by its path: a redirect's target, or a status.
        self.instead: dict[str, str | int] = {}
        #: Paths whose answer never ends.
        self.hangs: set[str] = set()
        self.asked: list[str] = []

    def release(
        self,
        version: str = "0.2.0",
        wheel: bytes | None = None,
        *,
        key: Any = KEY,
        tag: str | None = None,
        **more: Any,
    ) -> str:
        """Offer a release; returns the name of its wheel."""
        data = make_wheel(version) if wheel is None else wheel
        name = f"turnstile-{version}-py3-none-any.whl"
        self.files = {name: data, f"{name}.sha256": hashlib.sha256(data).hexdigest().encode()}
        if key is not None:
            self.files[f"{name}.sig"] = key.sign(data)
        self.latest = {"tag_name": tag or f"v{version}", "draft": False, "prerelease": False}
        self.latest |= more
        return name

    def answer(self, request: Any) -> Any:
        """The answer to a request."""
        path = request.path.decode()
        self.asked.append(path)
        if path in self.hangs:
            request.write(b"{")
            return NOT_DONE_YET
        instead = self.instead.get(path)
        if isinstance(instead, str):
            request.redirect(instead.encode())
            return b""
        if isinstance(instead, int):
            request.setResponseCode(instead)
            return b""
        if path == "/api/v1/repos/owner/turnstile/releases/latest" and self.latest is not None:
            assets = [
                {
                    "name": name,
                    "size": len(data),
                    "browser_download_url": f"{self.url}/download/{name}",
                }
                for name, data in self.files.items()
            ]
            request.setHeader(b"content-type", b"application/json")
            return json.dumps({"assets": assets, **self.latest}).encode()
        data = self.files.get(path.removeprefix("/download/"))
        if data is None:
            request.setResponseCode(404)
            return b"{}"
        return data

    def stop(self) -> Any:
        """Close it."""
        return self._port.stopListening()


def make_root(folder: Path, *versions: str, current: str | None = None) -> Path:
    """An installation's folder with these versions, the first one in place."""
    root = folder / "turnstile"
    (root / "releases").mkdir(parents=True)
    for version in versions:
        package = root / "releases" / version / "turnstile"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (root / "current").symlink_to(f"releases/{current or versions[0]}")
    return root
