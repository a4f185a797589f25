"""GPU-share's hooks for decode loops of others: on stand-ins, and on the real thing where it is installed.

pip install torch transformers llama-cpp-python
python -m pytest -m engines tests/test_gpushare_hooks.py
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from gpushare_kit import VirtualClock, join, new_key

from turnstile.gpushare.hooks import llama_cpp as for_llama
from turnstile.gpushare.hooks import transformers as for_transformers
from turnstile.gpushare.hooks.loop import StepLoop
from turnstile.gpushare.look import look_at

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")

TOKENS = 12


@pytest.fixture
def key():
    with new_key() as key:
        yield key


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def recorded(key, clock):
    """A peer of half the card, what it did, and another one that always computes."""
    peer, other = join(key, clock, "paced"), join(key, clock, "other")
    clock.advance(-clock.wall_us() % 80_000 / 1e6)
    other.touch()
    happened = []
    real_begin, real_end = peer.begin, peer.end

    def begin():
        other.touch()
        other.tick()
        real_begin()
        happened.append(("begin", clock.wall_us() % 80_000))

    def end():
        real_end()
        happened.append(("end", clock.wall_us() % 80_000))

    peer.begin, peer.end = begin, end
    peer.happened = happened
    yield peer
    assert peer._depth == 0
    peer.leave()
    other.leave()


def check_steps(happened, steps):
    """So many, none within another, each begun in its window (the first 40 ms of 80)."""
    assert [what for what, _ in happened] == ["begin", "end"] * steps
    assert all(at < 40_000 for what, at in happened if what == "begin")


# -- the loop itself


def test_a_loop_of_steps(recorded, clock):
    synced = []
    with StepLoop(recorded, lambda: synced.append(clock.passed_us)) as loop:
        for _ in range(TOKENS):
            clock.advance(0.015)
            loop.advance()
    check_steps(recorded.happened, TOKENS + 1)
    assert len(synced) == TOKENS + 1
    loop.finish()  # nothing is open
    assert len(synced) == TOKENS + 1


def test_without_a_context_it_ends_when_dropped(recorded):
    loop = StepLoop(recorded, lambda: pytest.fail("too late for that"))
    loop._is_open or loop.advance()
    assert recorded._depth == 1
    del loop
    check_steps(recorded.happened, 1)


def test_an_error_ends_the_step(recorded):
    with pytest.raises(ZeroDivisionError), StepLoop(recorded, lambda: pytest.fail("no sync")):
        raise ZeroDivisionError
    check_steps(recorded.happened, 1)

    def broken():
        raise RuntimeError("device lost")

    loop = StepLoop(recorded, broken)
    loop.advance()
    with pytest.raises(RuntimeError, match="device lost"):
        loop.advance()
    check_steps(recorded.happened, 2)


# -- transformers, on stand-ins


class Inner:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value)

    def end(self):
        self.got.append("end")


def test_the_streamer(recorded, clock):
    inner = Inner()
    streamer = for_transformers.PacingStreamer(recorded, inner, sync=lambda: None)
    streamer.put("prompt")
    check_steps([*recorded.happened[:1], ("end", 0)], 1)
    for token in range(TOKENS):
        clock.advance(0.015)
        streamer.put(token)
    streamer.end()
    check_steps(recorded.happened, TOKENS + 1)
    assert inner.got == ["prompt", *range(TOKENS), "end"]


def test_a_token_is_passed_on_before_the_wait(recorded, clock):
    class Timed(Inner):
        def put(self, value):
            self.got.append(clock.wall_us() % 80_000)

    inner = Timed()
    streamer = for_transformers.PacingStreamer(recorded, inner, sync=lambda: None)
    streamer.put(0)
    clock.advance(0.045)
    streamer.put(1)
    assert inner.got == [0, 45_000]
    assert recorded.happened[-1] == ("begin", 0)
    streamer.end()


class Module:
    """What torch's modules do about hooks."""

    def __init__(self, compute):
        self.compute = compute
        self.before, self.after = [], []

    def _register(self, hooks, hook):
        hooks.append(hook)
        return SimpleNamespace(remove=lambda: hooks.remove(hook))

    def register_forward_pre_hook(self, hook):
        return self._register(self.before, hook)

    def register_forward_hook(self, hook, *, always_call):
        assert always_call
        return self._register(self.after, hook)

    def __call__(self, *arguments):
        try:
            for hook in self.before:
                hook(self, arguments)
            return self.compute(*arguments)
        finally:
            for hook in self.after:
                hook(self, arguments, None)


def test_a_paced_module(recorded, clock):
    synced = []
    module = Module(lambda seconds: clock.advance(seconds))
    with for_transformers.pace(module, recorded, sync=lambda: synced.append(1)):
        for _ in range(TOKENS):
            module(0.015)
    check_steps(recorded.happened, TOKENS)
    assert len(synced) == TOKENS
    module(0.015)
    check_steps(recorded.happened, TOKENS)


def test_a_paced_module_that_fails(recorded):
    module = Module(lambda: 1 // 0)
    pacing = for_transformers.pace(module, recorded)
    with pytest.raises(ZeroDivisionError):
        module()
    check_steps(recorded.happened, 1)
    # Interrupted while it waits: no step began, none ends.
    recorded.begin = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        module()
    check_steps(recorded.happened, 1)
    pacing.remove()
    pacing.remove()
    assert module.before == module.after == []


def test_what_synchronises(monkeypatch):
    def backend(available):
        return SimpleNamespace(is_available=lambda: available, synchronize=lambda: available)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert for_transformers.find_sync() is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=backend(False)))
    assert for_transformers.find_sync() is None
    torch = SimpleNamespace(cuda=backend(False), xpu=backend(False), mps=backend(True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert for_transformers.find_sync() is torch.mps.synchronize
    torch.cuda = backend(True)
    assert for_transformers.find_sync() is torch.cuda.synchronize


# -- llama-cpp-python, on stand-ins


class Llama:
    n_batch = 4
    ctx = object()

    def __init__(self, clock):
        self.clock = clock
        self.evaluated = []

    def eval(self, tokens):
        assert len(tokens) <= self.n_batch
        self.clock.advance(0.001)
        self.evaluated += tokens


def test_a_paced_llama(recorded, clock, monkeypatch):
    synced = []

    def synchronize(context):
        synced.append(context)
        clock.advance(0.014)

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_synchronize=synchronize))
    llm = Llama(clock)
    with for_llama.pace(llm, recorded):
        llm.eval(list(range(10)))  # three batches
        llm.eval([10])
        llm.eval([])
        with for_llama.pace(llm, recorded):
            pass
        llm.eval([11])
    check_steps(recorded.happened, 5)
    assert llm.evaluated == list(range(12))
    assert synced == [llm.ctx] * 5
    llm.eval([12])
    check_steps(recorded.happened, 5)
    assert "eval" not in vars(llm)


def test_llama_criteria(recorded, clock):
    with for_llama.PacingCriteria(recorded) as criteria:
        for _ in range(3):
            clock.advance(0.015)
            assert criteria([1], [0.5]) is False
            clock.advance(0.015)
            logits = object()
            assert criteria.process([1], logits) is logits
    check_steps(recorded.happened, 7)


# -- the real thing


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return [
        pytest.mark.engines,
        pytest.mark.limit(600),
        pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    ]


def with_marks(marks):
    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


real_transformers = with_marks(needs("torch", "transformers"))
real_llama = with_marks(needs("llama_cpp"))


@pytest.fixture(scope="module")
def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model, batch=1, **options):
    import torch

    prompt = torch.arange(2, 10).repeat(batch, 1)
    with torch.inference_mode():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            **options,
        )


@real_transformers
def test_transformers_forward_passes(tiny_model, recorded):
    plain = generate(tiny_model)
    with for_transformers.pace(tiny_model, recorded):
        paced = generate(tiny_model)
    assert paced.tolist() == plain.tolist()
    assert plain.shape == (1, 8 + TOKENS)
    check_steps(recorded.happened, TOKENS)  # the prompt's gives the first token
    generate(tiny_model)
    check_steps(recorded.happened, TOKENS)


@real_transformers
def test_transformers_streamer(tiny_model, recorded):
    inner = Inner()
    streamer = for_transformers.PacingStreamer(recorded, inner)
    plain = generate(tiny_model)
    assert generate(tiny_model, streamer=streamer).tolist() == plain.tolist()
    check_steps(recorded.happened, TOKENS + 1)
    assert [int(value) for value in inner.got[1:-1]] == plain[0, 8:].tolist()


@real_transformers
@pytest.mark.parametrize("batch", [1, 3])
def test_transformers_criteria(tiny_model, recorded, batch):
    plain = generate(tiny_model, batch)
    with for_transformers.PacingCriteria(recorded) as criteria:
        paced = generate(tiny_model, batch, stopping_criteria=[criteria])
    assert paced.tolist() == plain.tolist()
    check_steps(recorded.happened, TOKENS + 1)


@real_transformers
def test_transformers_criteria_without_a_context(tiny_model, recorded):
    generate(tiny_model, stopping_criteria=[for_transformers.PacingCriteria(recorded)])
    check_steps(recorded.happened, TOKENS)


@real_transformers
def test_transformers_in_real_time(tiny_model, key):
    """Two peers of this process, one of them always active: the paced one steps in its windows."""
    import time

    from turnstile.gpushare import Peer

    with Peer.join(key, "real") as peer, Peer.join(key, "other") as other:
        other.open()
        with for_transformers.pace(tiny_model, peer):
            generate(tiny_model)
        began = look_at(key).peers[0].heartbeat_us
        deadline = time.monotonic() + 60
        while look_at(key).peers[0].heartbeat_us == began:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (real, _) = look_at(key).peers
        assert real.busy > 0
        assert real.active
        other.end()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    from llama_cpp import Llama as RealLlama
    from tiny_gguf import write_model

    path = tmp_path_factory.mktemp("models") / "micro.gguf"
    write_model(path, "micro")
    return RealLlama(
        str(path), verbose=False, n_ctx=256, n_batch=16, n_threads=1, n_threads_batch=1, seed=1
    )


PROMPT = "one two three four five six seven eight nine ten"


def complete(llm, **options):
    answer = llm.create_completion(PROMPT, max_tokens=TOKENS, temperature=0.0, **options)
    return answer["choices"][0]["text"], answer["usage"]


@real_llama
def test_llama_batches(tiny_llama, recorded):
    plain, usage = complete(tiny_llama)
    tiny_llama.reset()
    with for_llama.pace(tiny_llama, recorded):
        paced, again = complete(tiny_llama)
    assert (paced, again) == (plain, usage)
    assert usage["completion_tokens"] == TOKENS
    batches = -(-usage["prompt_tokens"] // 16)
    assert batches > 1
    # The last token is not evaluated any more.
    check_steps(recorded.happened, batches + TOKENS - 1)
    complete(tiny_llama)
    check_steps(recorded.happened, batches + TOKENS - 1)


@real_llama
def test_llama_stopping_criteria(tiny_llama, recorded):
    from llama_cpp import StoppingCriteriaList

    plain = complete(tiny_llama)
    with for_llama.PacingCriteria(recorded) as criteria:
        paced = complete(tiny_llama, stopping_criteria=StoppingCriteriaList([criteria]))
    assert paced == plain
    check_steps(recorded.happened, len(recorded.happened) // 2)
    # It is asked after each token, once more than tokens are used; the first step is the prompt's.
    assert TOKENS <= len(recorded.happened) // 2 <= TOKENS + 2


@real_llama
def test_llama_logits_processor(tiny_llama, recorded):
    from llama_cpp import LogitsProcessorList

    plain = complete(tiny_llama)
    with for_llama.PacingCriteria(recorded) as criteria:
        paced = complete(tiny_llama, logits_processor=LogitsProcessorList([criteria.process]))
    assert paced == plain
    check_steps(recorded.happened, TOKENS + 1)


@real_llama
def test_llama_chat_stream(tiny_llama, recorded):
    with for_llama.pace(tiny_llama, recorded):
        chunks = list(
            tiny_llama.create_chat_completion(
                [{"role": "user", "content": "hello"}], max_tokens=TOKENS, stream=True
            )
        )
    assert len(chunks) > 1
    assert len(recorded.happened) >= 4
    check_steps(recorded.happened, len(recorded.happened) // 2)
