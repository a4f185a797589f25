"""autobahn's WebSocket protocols, imported when the first WebSocket is opened.

autobahn checks UTF-8 with native code that takes longer to load than a whole turnstile, while nothing here has much of
it to check: what is relayed is the endpoints' to judge. It is left out unless the environment asks for it.
"""

import os

os.environ.setdefault("AUTOBAHN_USE_NVX", "0")

from autobahn.twisted import websocket

__all__ = ["websocket"]
