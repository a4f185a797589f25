"""How much of the card's memory is used, from whatever the host can tell, and when what an engine left is back.

:class:`~turnstile.vram.watch.Vram` is what the rest of turnstile uses; :mod:`turnstile.vram.choice` makes it from the
configuration. Probes run in a thread of their own, since a driver in trouble hangs whoever asks it.
"""

from turnstile.vram.back import Back
from turnstile.vram.reading import Gpu, ProbeError, Reading, choose
from turnstile.vram.watch import Vram

__all__ = ["Back", "Gpu", "ProbeError", "Reading", "Vram", "choose"]
