"""GPU-share for llama-cpp-python, in two ways.

`pace` is exact: each batch that the model evaluates is a step, those of the prompt too. The other needs no hold on
the model, only a say in its calls::

    with pace(llm, peer):                                  # and llm(...), llm.create_completion(...) as ever
        ...
    with PacingCriteria(peer) as criteria:
        llm(prompt, stopping_criteria=StoppingCriteriaList([criteria]))
"""

from __future__ import annotations

import contextlib

from turnstile.gpushare.hooks.loop import StepLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from turnstile.gpushare.peer import Peer


@contextlib.contextmanager
def pace(llm: Any, peer: Peer) -> Iterator[None]:
    """Let each batch that ``llm``, a `llama_cpp.Llama`, evaluates be a step of ``peer``, within this context."""
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    evaluate: Callable[[Sequence[int]], None] = llm.eval
    replaced = vars(llm).get("eval")

    def sync() -> None:
        # Decoding is only submitted by the call.
        llama_cpp.llama_synchronize(llm.ctx)

    def paced(tokens: Sequence[int]) -> None:
        # What it does in one go for a prompt, batch after batch, is a step each.
        for start in range(0, len(tokens), llm.n_batch):
            with peer.step(sync):
                evaluate(tokens[start : start + llm.n_batch])
        if not tokens:
            evaluate(tokens)

    llm.eval = paced
    try:
        yield
    finally:
        if replaced is None:
            del llm.eval  # the class's own is there again
        else:
            llm.eval = replaced


class PacingCriteria(StepLoop):
    """A stopping criterion that never stops, and paces; a logits processor that changes nothing, too.

    Use it as one of both. To have the prompt paced as well, use it as a context around the call.
    """

    def __init__(self, peer: Peer) -> None:
        # Sampling waits for the logits, so there is nothing left to synchronise.
        super().__init__(peer)

    def __call__(self, input_ids: Any, logits: Any) -> bool:
        """After each token: go on."""
        self.advance()
        return False

    def process(self, input_ids: Any, logits: Any) -> Any:
        """As a logits processor: the same logits, before each token is sampled."""
        self.advance()
        return logits
