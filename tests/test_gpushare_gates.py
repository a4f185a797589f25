"""GPU-share's promises, with whole worlds of peers on a virtual clock: `bench/gpushare` has them in real time."""

import itertools
import sys

import pytest
from gpushare_kit import World, measure_overlap, new_key, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.gpushare.errors import RegistryFullError
from turnstile.gpushare.schedule import Claim, make_schedule

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")

STEP_US = 8000
#: Nobody is woken exactly on time: by up to so much late, drawn for each.
LATE_US = 400


@pytest.fixture
def world():
    with new_key() as key:
        world = World(key, late_us=LATE_US)
        yield world
        world.close()


def solo_rate(step_us=STEP_US, host_us=0):
    """Steps a second of a peer that is alone, unpaced."""
    with new_key() as key:
        world = World(key, late_us=LATE_US)
        world.start("solo")
        world.spawn(world.decode("solo", step_us, paced=False, host_us=host_us))
        world.run(20)
        world.close()
        return len(world.card.steps) / 20


def share_out(world, weights, seconds=20.0, skews=(), step_us=STEP_US, paced=True, host_us=0):
    """Rates of peers that decode side by side, by name; the first seconds don't count."""
    for index, weight in enumerate(weights):
        name = f"w{weight:g}.{index}"
        skew = skews[index] if index < len(skews) else 0.0
        world.start(name, weight)
        world.spawn(world.decode(name, step_us, paced=paced, host_us=host_us), skew)
    world.run(max(skews, default=0.0) + 1.0)
    began = world.now_us
    world.run(seconds)
    counts = world.count(began, world.now_us)
    return [count / seconds for count in counts.values()], began


# -- gate 1


def test_three_see_each_other_and_one_is_killed(world):
    peers = [world.start(name, weight) for name, weight in (("a", 2.0), ("b", 1.0), ("c", 1.0))]
    for name in "abc":
        world.spawn(world.decode(name))
    world.run(3)
    for peer in peers:
        snapshot = peer.take_snapshot()
        assert [p.name for p in snapshot.peers] == ["a", "b", "c"]
        assert snapshot.get_shares() == {0: 0.5, 1: 0.25, 2: 0.25}
        assert all(p.active for p in snapshot.peers)
        busy = [p.busy for p in snapshot.peers]
        assert busy == pytest.approx([0.5, 0.25, 0.25], abs=0.06)
    world.kill("b")
    killed = world.now_us
    while any(p.name == "b" for p in peers[0].take_snapshot().peers):
        world.run(0.01)
    assert world.now_us - killed <= 3_500_000
    assert peers[2].take_snapshot().get_shares() == pytest.approx({0: 2 / 3, 2: 1 / 3})
    # Its slot is used again: first the 13 that are free, then that one.
    newcomers = [world.start(f"n{i}") for i in range(14)]
    assert newcomers[-1].slot == 1
    with pytest.raises(RegistryFullError):
        world.start("one too many")


# -- gate 2


@pytest.mark.parametrize(
    "weights, skews",
    [
        ((2, 1), ()),
        ((1, 1), ()),
        ((2, 1, 1), ()),
        ((2, 1), (0.0, 20.0)),
        ((1, 2), (20.0, 0.0)),
        ((3, 1), ()),
        ((1, 1, 1, 1), ()),
        ((1,) * 16, ()),
    ],
)
def test_steps_go_by_weight_and_none_is_lost(world, weights, skews):
    rates, began = share_out(world, weights, skews=skews)
    solo = solo_rate()
    assert sum(rates) >= 0.97 * solo
    total = sum(weights)
    for rate, weight in zip(rates, weights, strict=True):
        assert rate / sum(rates) == pytest.approx(weight / total, rel=0.05)
    if len(weights) == 2:
        assert rates[0] / rates[1] == pytest.approx(weights[0] / weights[1], rel=0.05)
    assert world.card.measure_overlap(began)[0] <= STEP_US + LATE_US
    assert world.strays == []
    check_gaps(world, began, weights)


def check_gaps(world, began, weights):
    """No stall is longer than the time of the others, and a step."""
    schedule = make_schedule(Claim(i, weight) for i, weight in enumerate(weights))
    for (name, peer), window in zip(world.peers.items(), schedule.windows, strict=True):
        ends = [done for who, _, done in world.card.steps if who == name and done > began]
        gaps = [b - a for a, b in itertools.pairwise(ends)]
        stall = schedule.period_us - (window.end_us - window.start_us)
        # One step of one's own, what is left of the last one of the other's, and being woken.
        assert max(gaps) <= stall + 2 * STEP_US + 2 * LATE_US, name
        assert peer.slot == window.slot


def test_extreme_weights_starve_nobody(world):
    rates, _ = share_out(world, (1000, 1))
    assert rates[1] / sum(rates) == pytest.approx(0.091, abs=0.012)
    assert sum(rates) >= 0.97 * solo_rate()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from((1, 2, 3)), min_size=2, max_size=4),
    st.integers(2000, 25000),
    st.integers(0, 2000),
    st.integers(0, 1000),
)
def test_whatever_the_length_of_a_step(weights, step_us, host_us, late_us):
    """Each overshoots into the next one's window by half a step on average, so nobody gains by it."""
    with new_key() as key:
        world = World(key, seed=step_us, late_us=late_us)
        rates, began = share_out(world, weights, 10.0, step_us=step_us, host_us=host_us)
        assert world.card.measure_overlap(began)[0] <= step_us + late_us
        schedule = make_schedule(Claim(i, weight) for i, weight in enumerate(weights))
        for rate, window in zip(rates, schedule.windows, strict=True):
            # A window holds whole steps; one more or less in each is what can't be helped.
            late = late_us / 2 * (2 if host_us else 1)
            expected = (window.end_us - window.start_us) / (step_us + host_us + late)
            steps = rate * schedule.period_us / 1e6
            assert expected - 1.5 <= steps <= expected + 1.5
        world.close()


def test_unpaced_all_are_equal(world):
    """What the simulated card does without GPU-share, for comparison."""
    rates, began = share_out(world, (2, 1), paced=False)
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    assert world.card.measure_overlap(began)[1] > 0.9 * 20_000_000


def test_alone_again_soon_after_the_other_idles(world):
    world.start("stays", 1.0)
    world.start("idles", 2.0)
    world.spawn(world.decode("stays"))
    idles_at = world.now_us + 5_000_000
    world.spawn(world.decode("idles", until_us=idles_at))
    world.run(5)
    shared = world.count(idles_at - 2_000_000, idles_at)["stays"] / 2
    world.run(2.5)
    began = world.now_us
    world.run(1.0)
    assert world.count(began, world.now_us)["stays"] == pytest.approx(solo_rate(), abs=2)
    assert shared == pytest.approx(solo_rate() / 3, rel=0.1)


def test_alone_again_soon_after_the_other_is_killed(world):
    world.start("stays", 1.0)
    world.start("dies", 2.0)
    for name in world.peers:
        world.spawn(world.decode(name))
    world.run(5)
    world.kill("dies")
    world.run(3.5)
    began = world.now_us
    world.run(1.0)
    assert world.count(began, world.now_us)["stays"] == pytest.approx(solo_rate(), abs=2)


def test_alone_again_at_once_if_the_other_leaves(world):
    world.start("stays", 1.0)
    world.start("leaves", 9.0)
    for name in world.peers:
        world.spawn(world.decode(name))
    world.run(5)
    world.leave("leaves")
    # Nobody sleeps for more than 50 ms without a look.
    world.run(0.06)
    began = world.now_us
    world.run(1.0)
    assert world.count(began, world.now_us)["stays"] == pytest.approx(solo_rate(), abs=2)


def test_a_newcomer_is_let_in_with_the_next_step(world):
    world.start("first", 1.0)
    world.spawn(world.decode("first"))
    world.run(3.003)
    joined = world.now_us
    world.start("second", 1.0)
    world.spawn(world.decode("second"))
    world.run(5.0)
    assert world.card.measure_overlap(joined)[0] <= STEP_US + LATE_US
    assert world.strays == []
    first = next(entered for who, entered, _ in world.card.steps if who == "second")
    assert first - joined <= 40_000 + LATE_US


def test_a_late_one_is_not_starved(world):
    """Woken so late that its window is over each time, it still gets a step a period."""
    with new_key() as key:
        world = World(key, seed=5, late_us=60_000)
        rates, _ = share_out(world, (1, 1), seconds=40)
        assert min(rates) > 4
        world.close()


# -- gate 4


def churn(key, seconds, seed):
    """16 peers that join, decode, change their weights, leave and are killed; what went wrong."""
    world = World(key, seed=seed, late_us=LATE_US)
    draw = world.random
    names = [f"p{i}" for i in range(16)]
    full_since = {}
    trouble = []
    joins = dict.fromkeys(names, 0)

    def live(name):
        while True:
            yield draw.uniform(0.0, 2.0)
            while True:
                try:
                    peer = world.start(name, draw.choice((0.5, 1.0, 2.0, 4.0)))
                    break
                except RegistryFullError:
                    # Those who were killed keep their slots for three seconds.
                    since = full_since.setdefault(name, world.now_us)
                    if world.now_us - since > 3_500_000:
                        trouble.append(f"{name} found no slot for 3.5 s")
                    yield 0.1
            full_since.pop(name, None)
            joins[name] += 1
            for _ in range(draw.randrange(1, 5)):
                until = world.now_us + round(draw.uniform(0.05, 4.0) * 1e6)
                world.spawn(world.decode(name, draw.choice((2000, 5000, STEP_US)), until_us=until))
                yield (until - world.now_us) / 1e6 + draw.uniform(0.0, 2.5)
                if draw.random() < 0.5:
                    peer.weight = draw.choice((0.5, 1.0, 2.0, 4.0))
                if peer.trouble or peer.slot is None:
                    trouble.append(f"{name} has no slot: {peer.trouble}")
            if draw.random() < 0.4:
                world.kill(name)
            else:
                world.leave(name)

    for name in names:
        world.spawn(live(name), draw.uniform(0.0, 1.0))
    try:
        for _ in range(int(seconds * 10)):
            world.run(0.1)
            owners = {}
            for name, peer in world.peers.items():
                if peer.slot is not None and name not in world._dead:
                    if peer.slot in owners:
                        trouble.append(f"{name} and {owners[peer.slot]} own slot {peer.slot}")
                    owners[peer.slot] = name
    finally:
        for name in names:
            world.kill(name)
    return world, trouble, joins


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sixteen_that_come_and_go(seed):
    with new_key() as key:
        world, trouble, joins = churn(key, 60, seed)
        assert trouble == []
        assert min(joins.values()) >= 3
        assert len(world.card.steps) > 3000
        # Whoever began a step owned the card by the registry of that moment.
        assert world.strays == []
        # No slot is stuck: those of the killed are dead after three seconds, and all can be had.
        world.clock.advance(3.1)
        watcher = world.start("w0")
        assert [peer.name for peer in watcher.take_snapshot().peers] == ["w0"]
        others = [world.start(f"w{i}") for i in range(1, 16)]
        assert sorted(p.slot for p in (watcher, *others)) == list(range(16))
        assert len(slots_of(watcher._registry)) == 16
        world.close()


# -- the measure itself


@pytest.mark.parametrize(
    "steps, overlap",
    [
        ([], (0, 0)),
        ([(0, 8)], (0, 0)),
        ([(0, 8), (8, 16)], (0, 0)),
        ([(0, 8), (7, 16)], (1, 1)),
        ([(0, 8), (1, 7)], (6, 6)),
        # Three inside at times, two throughout.
        ([(0, 10), (2, 8), (5, 20), (9, 12)], (10, 10)),
        ([(0, 4), (2, 6), (4, 8), (6, 9)], (6, 6)),
        ([(0, 4), (2, 3), (10, 20), (15, 30)], (5, 6)),
    ],
)
def test_measuring_overlap(steps, overlap):
    assert measure_overlap(steps) == overlap
