import json
import math

import pytest
from limits import HANG_S
from processes import results

from gcnzc.exchange import AllGatherScalar, Choices, Link, Tuning, init_group, lockstep, tune
from gcnzc.exchange.measure import make_request, time_algorithms
from gcnzc.exchange.requests import yield_request
from gcnzc.exchange.tuner import KINDS, measure

ALPHA_S, BYTES_PER_S = 1e-3, 1e7
LINK = Link(bytes_per_s=BYTES_PER_S, delay_s=ALPHA_S)


def virtual(kind, size, names, rounds):
    """Time four ranks by the virtual clock of `lockstep`."""
    seconds = []
    for name in names:
        algorithms = [yield_request(make_request(kind, size, rank, 4)) for rank in range(4)]
        seconds.append(
            max(lockstep(algorithms, LINK, choices=Choices.always(**{kind: name})).seconds)
        )
    return seconds, (1 + rounds) * sum(seconds)


def test_the_fastest_algorithm_is_chosen_for_each_size():
    sizes = dict.fromkeys(KINDS, (4, 1 << 10, 64 << 10))
    tuning = Tuning(measure(virtual, sizes, 4, math.inf))
    rows = {(row.kind, row.num_bytes): row for row in tuning.rows()}
    assert set(rows) == {(kind, size) for kind in KINDS for size in sizes[kind]}
    for row in rows.values():
        if row.kind != "AllToAll":
            assert row.seconds <= min(row.all_s.values()) / 0.95
        assert row.seconds <= row.builtin_s == row.all_s["builtin"]
        assert row.seconds == row.all_s[row.chosen]
    # two rounds take less time than six; four rounds that send less are fastest for large sizes
    assert rows["Sum", 4].chosen == "doubling"
    assert rows["Sum", 4].seconds == pytest.approx(2 * ALPHA_S, rel=1e-2)
    assert rows["Sum", 4].builtin_s == pytest.approx(6 * ALPHA_S, rel=1e-2)
    assert rows["Sum", 64 << 10].chosen == "halving"
    # in lockstep builtin is binomial, so no other algorithm is faster
    assert rows["Broadcast", 4].chosen == "builtin"
    assert rows["AllGather", 4].chosen == "doubling"
    assert rows["Broadcast", 64 << 10].chosen == "chain:8192"
    assert rows["AllToAll", 4].chosen == "builtin"


def test_builtin_is_chosen_unless_another_is_clearly_faster():
    times = {
        4: {"doubling": 1.0, "builtin": 1.04},
        64: {"doubling": 1.0, "halving": 0.9, "builtin": 2.0},
        # about as fast as the choice for the previous size
        1024: {"doubling": 0.97, "halving": 1.0, "builtin": 2.0},
        8192: {"doubling": 1.0, "halving": 1.2, "builtin": 1.04},
        9_000_000: {},
    }
    choices = Tuning({"Sum": times}).choices
    assert choices.steps == {
        "Sum": (
            (16, "builtin"),
            (round(math.sqrt(1024 * 8192)), "halving"),
            (8 * 8192, "builtin"),
            (None, "default"),
        )
    }
    # larger sizes, and kinds without times, have the default
    for kind, size in [("Sum", 8 * 8192 + 1), ("Broadcast", 1 << 20)]:
        expected = Choices().find_for_size(kind, size, 64)
        assert choices.find_for_size(kind, size, 64) == expected != "builtin"


def test_outliers_are_removed_by_neighbouring_sizes():
    outliers = {64: 1.45, 8192: 0.7}
    times = {
        size: {"doubling": outliers.get(size, 1.0), "builtin": 1.5 if size < 1000 else 0.8}
        for size in (16 << power for power in range(12))
    }
    assert Tuning({"Sum": times}).choices.steps["Sum"] == (
        (724, "doubling"),
        (8 * (16 << 11), "builtin"),
        (None, "default"),
    )
    # but not if the time itself is slower than builtin
    times[64]["doubling"] = 1.6
    assert Tuning({"Sum": times}).choices.find_for_size("Sum", 64, 8) == "builtin"
    times[64]["doubling"] = 1.45
    # sizes that are farther apart are not smoothed
    times = {size: times[size] for size in (64, 512, 4096)}
    assert Tuning({"Sum": times}).choices.find_for_size("Sum", 64, 8) == "builtin"


@pytest.mark.parametrize(
    ("direct", "chosen"),
    [((0.5, 1.0, 1.05), "direct"), ((0.5, 1.0, 1.1), "builtin"), ((1.0, 0.96, 1.0), "builtin")],
)
def test_one_algorithm_is_chosen_for_all_sizes_of_all_to_all(direct, chosen):
    times = {
        size: {"direct": seconds, "builtin": 1.0}
        for size, seconds in zip((4, 64, 1024), direct, strict=True)
    }
    assert Tuning({"AllToAll": times}).choices.steps["AllToAll"] == ((None, chosen),)


def tune_twice(folder):
    """Tune, read the cached times, and tune another kind."""
    with init_group() as group:
        default = group.choices
        # on a busy machine, a shorter time leaves out sizes
        first = tune(group, folder, {"Sum": [4, 4000], "Broadcast": [20_000]}, budget_s=HANG_S)
        requested = group.ledger.entries["Sum"].requests
        buffers = sum(
            len(free) for each in group._channels.values() for free in each.buffers.free.values()
        )
        second = tune(group, folder, {"Sum": [4000], "Broadcast": [20_000]}, budget_s=HANG_S)
        repeated = group.ledger.entries["Sum"].requests - requested
        third = tune(group, folder, {"AllGather": [64]}, budget_s=HANG_S)
        group.choices = third.choices
        scalars = group.run(yield_request(AllGatherScalar(group.rank)))
        assert group.choices is not default
        seconds = time_algorithms(group, "AllToAll", 100, ["direct", "builtin"], 3)
        return (
            first.times,
            second.times,
            third.times,
            buffers,
            requested,
            repeated,
            scalars,
            seconds,
        )


def test_ranks_measure_once_and_have_the_same_times(tmp_path):
    folder = tmp_path / "cache"
    found = results(2, tmp_path, tune_twice, folder)
    for first, second, third, buffers, requested, repeated, scalars, seconds in found:
        assert {kind: set(sizes) for kind, sizes in first.items()} == {
            "Sum": {4, 4000},
            "Broadcast": {20_000},
        }
        assert set(first["Sum"][4]) == {"doubling", "halving", "ring", "builtin"}
        assert first == second == {kind: third[kind] for kind in first}
        assert first == found[0][0]
        assert third == found[0][2]
        assert set(third["AllGather"]) == {64}
        assert requested > 0
        assert repeated == 0
        assert buffers == 0
        assert scalars == (0, 1)
        assert seconds.shape == (3, 2)
        assert bool((seconds > 0).all())
    (path,) = folder.iterdir()
    cached = json.loads(path.read_text())
    assert cached["backend"] == "gloo"
    assert len(cached["hosts"]) == 2
    # a damaged file is replaced
    path.write_text(path.read_text()[:100])
    again = results(2, tmp_path, tune_twice, folder)
    assert again[0][4] > 0
    assert json.loads(path.read_text())["times"].keys() == {"Sum", "Broadcast", "AllGather"}


def test_a_single_rank_measures_nothing(tmp_path):
    with init_group() as group:
        assert tune(group, tmp_path).times == {}
        with pytest.raises(ValueError, match="hint: use one of Sum, AllGather"):
            tune(group, tmp_path, {"SendReceive": [4]})
    assert list(tmp_path.iterdir()) == []
