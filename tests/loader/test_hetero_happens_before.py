"""Random programs of typed minibatches, under a happens-before checker; see `transfer_programs`."""

from functools import cache

import pytest
from mutants import assert_each_call_is_needed
from transfer_programs import replaced_threads, run
from typed_transfer_programs import HeteroLoaderProgram, TypedTransferProgram

from gcnzc.loader import transfer

NUM_SCHEDULES = {TypedTransferProgram: 30, HeteroLoaderProgram: 10}
MANY_SCHEDULES = {TypedTransferProgram: 1400, HeteroLoaderProgram: 400}
# runs without a statement, of which at least one must have a race
NUM_ATTEMPTS = 150


@pytest.fixture(scope="module", autouse=True)
def threads():
    with replaced_threads(NUM_SCHEDULES):
        yield


@cache
def run_some(kind):
    """Run programs, and return the numbers of tables of their typed batches."""
    numbers, num_read = set(), 0
    for seed in range(NUM_SCHEDULES[kind]):
        program = run(kind, seed)
        races = program.device.races
        assert not races, f"{kind.__name__} {seed}: {races[0]}"
        numbers.add(len(program.kinds))
        num_read += program.num_read
    # most programs read several batches
    assert num_read >= 2 * NUM_SCHEDULES[kind]
    return numbers


@pytest.mark.parametrize("kind", NUM_SCHEDULES)
def test_all_accesses_are_ordered_in_random_schedules(kind):
    assert run_some(kind) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("kind", MANY_SCHEDULES)
def test_all_accesses_are_ordered_in_many_schedules(kind, part):
    count = MANY_SCHEDULES[kind]
    for seed in range(part * count, (part + 1) * count):
        races = run(kind, seed).device.races
        assert not races, f"{kind.__name__} {seed}: {races[0]}"


def is_found(seed):
    program = run(TypedTransferProgram, seed, may_fail=True)
    return bool(program.device.races) or program.error is not None


# what statements call that order accesses, or that keep what is accessed or by whom
ORDERING = ("wait", "synchronize", "copies.append")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ORDERING)
def test_leaving_out_any_statement_that_orders_accesses_is_found(name):
    assert_each_call_is_needed(
        transfer,
        name,
        "Transfer",
        lambda: any(is_found(seed) for seed in range(NUM_ATTEMPTS)),
    )
