"""The data path: HTTP and WebSocket, in and out."""
