"""Which threads and processes may use a group."""

import os
import threading
import traceback

import pytest
import torch
from exchange.cases import ask
from limits import HANG_S
from processes import results

from gcnzc.exchange import AllGatherScalar, Compute, Group, Start, Sum, Wait, init_group, run


def nested(group):
    """An algorithm that runs another one on its group."""
    inner = run(ask(AllGatherScalar(1)), group)
    yield Compute(0.0)
    return inner


def wait_until(event, reached):
    reached.set()
    assert event.wait(HANG_S)
    yield Compute(0.0)


def test_a_second_thread_gets_an_error_at_once():
    group, entered, leave = Group(), threading.Event(), threading.Event()
    thread = threading.Thread(target=run, args=(wait_until(leave, entered), group))
    thread.start()
    try:
        assert entered.wait(HANG_S)
        with pytest.raises(RuntimeError, match=r"thread MainThread of rank 0 .*\n\nhint: use a g"):
            run(ask(AllGatherScalar(1)), group)
    finally:
        leave.set()
        thread.join()
    # threads may use it one after the other, and an algorithm may run another one
    assert list(run(nested(group), group)) == [1]


def start_and_wait(group):
    """Return a sum, started on a channel, whose thread executes it."""
    pending = yield Start(Sum(torch.full((3,), 1.0 + group.rank)))
    return (yield Wait(pending)).tolist()


def use_in_two_threads():
    """Return the error of a thread that uses the group while the main thread waits in it."""
    found = []
    with init_group(timeout_s=20) as group:
        waits = threading.Event()

        def use():
            try:
                assert waits.wait(HANG_S)
                run(ask(Sum(torch.ones(3))), group)
            except RuntimeError as error:
                found.append(str(error))

        thread = threading.Thread(target=use, name="second")

        def algorithm():
            waits.set()
            while not found:
                yield Compute(0.001)
            return (yield from start_and_wait(group))

        thread.start()
        total = run(algorithm(), group)
        thread.join()
    return found, total


def test_a_second_thread_does_not_change_the_results_of_the_first(tmp_path):
    for (error,), total in results(2, tmp_path, use_in_two_threads):
        assert total == [3.0] * 3
        assert "thread second of rank" in error


def fork_and_use():
    """Return the errors of a fork of rank 1 that uses the group, and the ranks' later answer."""
    errors = []
    with init_group(timeout_s=20) as group:
        if group.rank == 1:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    for use in (
                        lambda: run(ask(AllGatherScalar(7)), group),
                        lambda: group.subgroup([0, 1]),
                        lambda: group.channel("new"),
                    ):
                        try:
                            use()
                        except RuntimeError as error:
                            os.write(writer, f"{error}\0".encode())
                    # as at the end of the `with`
                    group.close()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as file:
                errors = file.read().split("\0")[:-1]
            os.waitpid(child, 0)
        answers = [list(run(ask(AllGatherScalar(group.rank)), group)) for _ in range(2)]
    return errors, answers


def test_a_forked_process_gets_an_error_and_leaves_the_group_intact(tmp_path):
    (_, first), (errors, second) = results(2, tmp_path, fork_and_use)
    assert len(errors) == 3
    for error in errors:
        assert "uses the group of rank 1, which process" in error
        assert "hint: communicate in the process that called init_group()" in error
    assert first == second == [[0, 1]] * 2


def leave_in_a_fork():
    """Raise an error through `with init_group()` in a fork; return the ranks' later answer."""
    is_child, child = False, 0
    try:
        with init_group(timeout_s=20) as group:
            if group.rank == 1:
                child = os.fork()
                if is_child := child == 0:
                    run(ask(AllGatherScalar(7)), group)
                os.waitpid(child, 0)
            return list(run(ask(AllGatherScalar(group.rank)), group))
    except BaseException:
        if is_child:
            os._exit(0)
        raise


def test_a_fork_that_leaves_the_with_does_not_end_the_group(tmp_path):
    assert results(2, tmp_path, leave_in_a_fork) == [[0, 1]] * 2
