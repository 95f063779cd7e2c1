"""Random programs of Transfer, the loaders and the feature cache, under a happens-before checker.

It finds accesses that no event, stream order, lock or queue puts in order, whatever order they were
executed in. Minibatches of loaders equal those on the host bit for bit. See `transfer_programs`,
`checked_device` and `happens_before`.
"""

from functools import cache

import pytest
from mutants import assert_each_call_is_needed
from transfer_programs import (
    LoaderProgram,
    TransferProgram,
    TypedLoaderProgram,
    replaced_threads,
    run,
)

from gcnzc.loader import transfer

# of each kind: what `make test` runs, and each of the five slow tests, of which CI runs the first
NUM_SCHEDULES = {TransferProgram: 50, LoaderProgram: 20, TypedLoaderProgram: 20}
MANY_SCHEDULES = {TransferProgram: 1200, LoaderProgram: 400, TypedLoaderProgram: 400}
# runs without a call; a race must be found in at least one of them, since threads meet in few
NUM_ATTEMPTS = 150


@pytest.fixture(scope="module", autouse=True)
def threads():
    with replaced_threads():
        yield


def run_all(kind, seeds):
    """Run programs, which have no race; return the seeds of those that make each call."""
    seeds_by_call, num_read = {}, 0
    for seed in seeds:
        program = run(kind, seed)
        races = program.device.races
        assert not races, f"{kind.__name__} {seed}: {races[0]}"
        num_read += program.num_read
        for call in program.device.calls:
            seeds_by_call.setdefault(call, []).append(seed)
    # most programs read several batches
    assert num_read >= 2 * len(seeds)
    return seeds_by_call


@cache
def run_some(kind):
    return run_all(kind, range(NUM_SCHEDULES[kind]))


@pytest.mark.parametrize("kind", NUM_SCHEDULES)
def test_all_accesses_are_ordered_in_random_schedules(kind):
    run_some(kind)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("kind", MANY_SCHEDULES)
def test_all_accesses_are_ordered_in_ten_thousand_schedules(kind, part):
    count = MANY_SCHEDULES[kind]
    run_all(kind, range(part * count, (part + 1) * count))


def is_found(kind, seed, call=None):
    """Whether a run has a race; a failure counts, too, if a lock or a statement is left out."""
    program = run(kind, seed, call, may_fail=True)
    if call is not None and call[0] != "lock":
        return bool(program.device.races)
    return bool(program.device.races) or program.error is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_leaving_out_any_call_that_orders_accesses_is_found():
    calls = set().union(*map(run_some, NUM_SCHEDULES))
    assert {call[0] for call in calls} >= {
        "record",
        "wait",
        "query",
        "synchronize",
        "append",
        "lock",
    }
    for call in sorted(calls):
        assert any(
            is_found(kind, seed, call)
            for kind in NUM_SCHEDULES
            for seed in run_some(kind).get(call, [])[:NUM_ATTEMPTS]
        ), f"nothing is found without {call}"


# what statements call that order accesses, or that keep what is accessed or by whom
ORDERING = ("wait", "_wait", "synchronize", "close", "readers.append", "writers.append")
ORDERING += ("copies.append", "_pending.append")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ORDERING)
def test_leaving_out_any_statement_that_orders_accesses_is_found(name):
    assert_each_call_is_needed(
        transfer,
        name,
        "Transfer",
        lambda: any(is_found(TransferProgram, seed) for seed in range(NUM_ATTEMPTS)),
    )
