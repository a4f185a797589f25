"""GPU-share for Hugging Face transformers, in three ways.

`pace` is exact: each forward pass of the model is a step, the prompt's too, and nothing else is. The others
need no hold on the model, only a say in ``generate``::

    handle = pace(model, peer)                             # and model.generate(...) as ever
    model.generate(..., streamer=PacingStreamer(peer, TextStreamer(tokenizer)))
    with PacingCriteria(peer) as criteria:
        model.generate(..., stopping_criteria=[criteria])
"""

from __future__ import annotations

import sys

from turnstile.gpushare.hooks.loop import StepLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self

    from turnstile.gpushare.peer import Peer


def find_sync() -> Callable[[], object] | None:
    """What waits for the accelerator that torch works on; None on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for name in ("cuda", "xpu", "mps"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available():
            sync: Callable[[], object] = backend.synchronize
            return sync
    return None


class PacingStreamer:
    """A streamer for ``generate`` that paces it; ``inner``, another streamer, gets everything first.

    ``generate`` hands it the prompt before the first step and each token after its own, so every step is
    paced. One wait comes after the last token, since nobody can know that it is.
    """

    def __init__(
        self, peer: Peer, inner: Any = None, *, sync: Callable[[], object] | None = None
    ) -> None:
        self._inner = inner
        self._loop = StepLoop(peer, sync if sync is not None else find_sync())

    def put(self, value: Any) -> None:
        """A token, or the prompt."""
        if self._inner is not None:
            self._inner.put(value)
        self._loop.advance()

    def end(self) -> None:
        """No more tokens."""
        self._loop.finish()
        if self._inner is not None:
            self._inner.end()


class PacingCriteria(StepLoop):
    """A stopping criterion for ``generate`` that never stops it, and paces it.

    To have the prompt paced as well, use it as a context around ``generate``.
    """

    def __init__(self, peer: Peer, *, sync: Callable[[], object] | None = None) -> None:
        super().__init__(peer, sync if sync is not None else find_sync())

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """After each token: not done, for no sequence of the batch."""
        import torch  # type: ignore[import-not-found, unused-ignore]

        self.advance()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Pacing:
    """What `pace` set up; `remove` undoes it, and so does leaving it as a context."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Let the model run unpaced again."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def pace(module: Any, peer: Peer, *, sync: Callable[[], object] | None = None) -> Pacing:
    """Let each forward pass of ``module``, any torch module, be a step of ``peer``.

    ``sync`` is called at the end of each; by default what synchronises torch's accelerator, if there is one.
    """
    sync = sync if sync is not None else find_sync()
    begun: list[None] = []

    def before(*_: Any) -> None:
        peer.begin()
        begun.append(None)

    def after(*_: Any) -> None:
        # It is called as well if something failed before the step began.
        if not begun:
            return
        begun.pop()
        try:
            if sync is not None:
                sync()
        finally:
            peer.end()

    # In this order: should the second fail to register, the first must not be left without it.
    ends = module.register_forward_hook(after, always_call=True)
    return Pacing([ends, module.register_forward_pre_hook(before)])
