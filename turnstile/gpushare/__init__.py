"""GPU-share: processes on one card find each other and divide its time by weight.

    from turnstile.gpushare import Peer

    with Peer.join(name="qwen3-4b", weight=2.0) as peer:
        while ...:
            with peer.step(sync=torch.cuda.synchronize):
                model_step()

Needs nothing but the standard library, and imports in milliseconds. Peers of opencoti-llamafile's own make
share the same registry.
"""

from turnstile.gpushare.errors import GpuKeyError, GpuShareError, RegistryFullError, SegmentError
from turnstile.gpushare.peer import Peer

__all__ = ["GpuKeyError", "GpuShareError", "Peer", "RegistryFullError", "SegmentError"]
