"""GPU-share's division of time: shares, periods, windows."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnstile.gpushare.schedule import (
    FLOOR,
    LONGEST_PERIOD_US,
    SHORTEST_PERIOD_US,
    Claim,
    compute_shares,
    make_schedule,
    window,
)

EPOCH_US = 1_800_000_000_000_000
WEIRD = [math.nan, math.inf, -math.inf, 0.0, -0.0, -3.0]
weights = st.one_of(st.floats(1e-37, 3.4e38), st.floats(0.1, 10.0), st.integers(1, 4).map(float))
any_weights = st.one_of(weights, st.sampled_from(WEIRD))


@st.composite
def claims(draw, least=1, values=weights):
    slots = draw(st.lists(st.integers(0, 15), min_size=least, max_size=16, unique=True))
    return [Claim(slot, draw(values)) for slot in slots]


def lengths(schedule):
    return {w.slot: w.end_us - w.start_us for w in schedule.windows}


@pytest.mark.parametrize(
    "weights, period_ms, windows_ms",
    [
        # The figures of the original's documentation.
        ([2, 1], 120, [80, 40]),
        ([1, 1], 80, [40, 40]),
        ([2, 1, 1], 160, [80, 40, 40]),
        # The floor: 1/11 is raised to 1/10, which makes 1.1 in all.
        ([1000, 1], None, None),
        ([1], 80, [80]),
        ([1] * 5, 200, [40] * 5),
        ([1] * 10, 400, [40] * 10),
        ([1] * 16, 400, [25] * 16),
    ],
)
def test_periods_and_windows(weights, period_ms, windows_ms):
    schedule = make_schedule(Claim(i, w) for i, w in enumerate(weights))
    if period_ms is None:
        # 1/1001 counts as a tenth: of 1.099 that is 9.1 %, and 40 ms of that make more than 400 ms.
        assert schedule.period_us == LONGEST_PERIOD_US
        assert lengths(schedule)[1] == pytest.approx(400_000 * 0.1 / (1000 / 1001 + 0.1), abs=1)
        return
    assert schedule.period_us == period_ms * 1000
    assert list(lengths(schedule).values()) == [ms * 1000 for ms in windows_ms]


def test_the_spec_case():
    assert compute_shares([2, 1, 1]) == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("extreme", [[3e38, 1e-38], [3e38, 3e38, 1], [1e-45, 1.0]])
def test_extreme_weights_starve_nobody(extreme):
    shares = compute_shares(extreme)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= FLOOR / (1 + FLOOR * len(extreme))


@pytest.mark.parametrize("weird", WEIRD)
def test_a_weight_that_is_none_counts_as_one(weird):
    assert compute_shares([weird, 1.0]) == [0.5, 0.5]
    assert compute_shares([2.0, weird]) == compute_shares([2.0, 1.0])


def test_nobody_and_somebody_unknown():
    nobody = make_schedule([])
    assert nobody.windows == ()
    with pytest.raises(KeyError):
        nobody.get_owner(EPOCH_US)
    with pytest.raises(KeyError):
        window([Claim(3, 1.0)], 4, EPOCH_US)
    with pytest.raises(ValueError, match="one slot"):
        make_schedule([Claim(3, 1.0), Claim(3, 2.0)])


def test_alone_never_waits():
    for now in range(EPOCH_US, EPOCH_US + 500_000, 777):
        assert window([Claim(9, 0.5)], 9, now) == now


def test_inside_and_outside():
    pair = [Claim(2, 2.0), Claim(7, 1.0)]
    start = EPOCH_US - EPOCH_US % 120_000
    assert window(pair, 2, start) == start
    assert window(pair, 2, start + 79_999) == start + 79_999
    assert window(pair, 2, start + 80_000) == start + 120_000
    assert window(pair, 7, start) == start + 80_000
    assert window(pair, 7, start + 80_000) == start + 80_000
    assert window(pair, 7, start + 119_999) == start + 119_999


@given(claims(values=any_weights))
@example([Claim(i, 1.0) for i in range(16)])
@example([Claim(0, 3.4e38), Claim(1, 1e-45)])
def test_windows_partition_the_period(claims):
    schedule = make_schedule(claims)
    assert SHORTEST_PERIOD_US <= schedule.period_us <= LONGEST_PERIOD_US
    at = 0
    for w in schedule.windows:
        assert w.start_us == at
        assert w.end_us > at
        at = w.end_us
    assert at == schedule.period_us
    assert [w.slot for w in schedule.windows] == sorted(claim.slot for claim in claims)


@given(claims())
def test_everybody_gets_the_share_to_a_microsecond(claims):
    schedule = make_schedule(claims)
    shares = dict(
        zip(
            sorted(c.slot for c in claims),
            compute_shares([c.weight for c in sorted(claims)]),
            strict=True,
        )
    )
    assert sum(shares.values()) == pytest.approx(1)
    for slot, length in lengths(schedule).items():
        assert abs(length - shares[slot] * schedule.period_us) <= 1


@given(claims())
def test_shares_are_ratios_unless_the_floor_binds(claims):
    total = sum(claim.weight for claim in claims)
    shares = compute_shares([claim.weight for claim in claims])
    plain = [claim.weight / total for claim in claims]
    if min(plain) >= FLOOR:
        assert shares == pytest.approx(plain, rel=1e-9)
    order = sorted(range(len(claims)), key=lambda i: claims[i].weight)
    ranked = [shares[i] for i in order]
    assert ranked == sorted(ranked)


@given(claims(), st.randoms(), st.integers(0, 1 << 52))
def test_all_derive_the_same_and_one_owner_at_any_time(claims, random, now):
    schedule = make_schedule(claims)
    shuffled = list(claims)
    random.shuffle(shuffled)
    assert make_schedule(shuffled) == schedule
    inside = [c.slot for c in claims if window(shuffled, c.slot, now) == now]
    assert inside == [schedule.get_owner(now)]


@given(claims(), st.integers(0, 1 << 52))
def test_the_worst_wait_is_the_rest_of_the_period(claims, now):
    schedule = make_schedule(claims)
    for w in schedule.windows:
        stall = schedule.period_us - (w.end_us - w.start_us)
        wait = schedule.wait_us(w.slot, now)
        assert 0 <= wait <= stall
        # (1 - share) of the period, to the microsecond that rounding may add.
        assert stall <= (1 - w.share) * schedule.period_us + 1
        # The wait is exact: one is inside after it, and the moment before not.
        assert schedule.wait_us(w.slot, now + wait) == 0
        if wait:
            assert schedule.get_owner(now + wait - 1) != w.slot
        # It is as long as the stall at the very end of one's window.
        ended = now - now % schedule.period_us + w.end_us
        if len(claims) > 1:
            assert schedule.wait_us(w.slot, ended) == stall
