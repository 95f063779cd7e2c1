"""The default algorithms: their costs against simulated times, and their distance to the best."""

import pytest

from gcnzc.exchange import AllGather, Broadcast, Choices, Link, SizeOnly, Sum, lockstep
from gcnzc.exchange.algorithms import (
    ALGORITHMS,
    BUILTIN_FACTOR,
    LATENCIES,
    MEASURED_FACTORS,
    default_algorithm,
)
from gcnzc.exchange.collectives.broadcast import PIECE_OVERHEAD
from gcnzc.exchange.requests import BUILTIN

BYTES_PER_S = 12.5e6
KINDS = {"Sum": Sum, "AllGather": AllGather, "Broadcast": Broadcast}


def simulated_s(kind, name, num_bytes, world_size, link):
    def algorithm():
        yield KINDS[kind](SizeOnly(num_bytes // 4))

    choices = Choices.always(**{kind: name})
    return max(lockstep([algorithm() for _ in range(world_size)], link, choices=choices).seconds)


@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 13, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_the_simulated_times(kind, world_size):
    is_power = world_size & (world_size - 1) == 0
    for latency in LATENCIES:
        for num_bytes in (1 << 12, 1 << 20):
            for name, (messages, size) in KINDS[kind].critical_paths(num_bytes, world_size).items():
                if name == BUILTIN:
                    continue
                message_s = PIECE_OVERHEAD / BYTES_PER_S if name.startswith("chain") else 0.0
                link = Link(BYTES_PER_S, latency / BYTES_PER_S, message_s)
                seconds = simulated_s(kind, name, num_bytes, world_size, link)
                expected_s = (messages * latency + size) / BYTES_PER_S
                if is_power or kind == "AllGather":
                    assert seconds == pytest.approx(expected_s, rel=0.06), (
                        name,
                        latency,
                        num_bytes,
                    )
                else:
                    # the cost is a bound: some messages overlap with others
                    assert 0.5 * expected_s < seconds < 1.06 * expected_s


@pytest.mark.parametrize("world_size", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_has_the_least_largest_factor(kind, world_size):
    for num_bytes in (1, 1 << 10, 386_000, 1 << 24, 1 << 30):
        paths, factors = KINDS[kind].critical_paths(num_bytes, world_size), {}
        for latency in LATENCIES:
            costs = {
                name: messages * latency + MEASURED_FACTORS.get(kind, {}).get(name, 1) * size
                for name, (messages, size) in paths.items()
            }
            for name, cost in costs.items():
                allowance = BUILTIN_FACTOR if name == BUILTIN else 1.0
                factors.setdefault(name, []).append(cost / min(costs.values()) / allowance)
        largest = {name: max(each) for name, each in factors.items()}
        assert largest[default_algorithm(kind, num_bytes, world_size)] == min(largest.values())


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_kind_has_a_default_that_exists(kind):
    for world_size in (1, 2, 7, 1024):
        for num_bytes in (0, 1, 1 << 30):
            name = default_algorithm(kind, num_bytes, world_size)
            # raises if there is no such algorithm
            Choices.always(**{kind: name})


def test_started_requests_use_builtin_for_large_sums_and_gathers():
    background = Choices().in_background
    assert background.find_for_size("Sum", 16 << 10, 8) == "doubling"
    assert background.find_for_size("Sum", (16 << 10) + 1, 8) == BUILTIN
    assert background.find_for_size("AllGather", 1, 8) == BUILTIN
    tuned = Choices.always(Sum="halving", AllGather="doubling").in_background
    assert tuned.find_for_size("Sum", 1 << 20, 8) == "halving"
    assert tuned.find_for_size("AllGather", 1, 8) == BUILTIN


def test_a_default_step_is_for_its_sizes_only():
    choices = Choices({"Sum": ((100, "ring"), (1 << 20, "default"), (None, "halving"))})
    assert choices.find_for_size("Sum", 100, 8) == "ring"
    assert choices.find_for_size("Sum", 1000, 8) == default_algorithm("Sum", 1000, 8) == "doubling"
    assert choices.find_for_size("Sum", 1 << 21, 2) == "halving"
