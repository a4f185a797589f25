"""The public keys that releases are signed with: PEM texts of Ed25519 keys (``openssl pkey -in private.pem -pubout``).

A release is accepted if one of them fits, so that a key can be replaced by another over two releases. Without a key
nothing is ever updated.
"""

PUBLIC_KEYS: tuple[str, ...] = ()
