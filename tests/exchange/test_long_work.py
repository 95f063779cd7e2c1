"""Work in parts: who is done waits for the others, and errors of one are errors of all."""

import time

import pytest
from processes import results

from gcnzc.exchange import Group, init_group
from gcnzc.exchange.long_work import SIGNS, joint_work

FAILURES = [
    ValueError("too few\n\nhint: give more"),
    FileNotFoundError("no file x"),
    PermissionError(13, "Permission denied", "x"),
    MemoryError(),
]


def work_for_long():
    """Work for twice as long as a request waits for, in two ways; and fail."""
    told = []
    with init_group(timeout_s=1) as group:
        with joint_work(group) as work:
            if group.rank == 0:
                told.append(work.meanwhile(lambda: time.sleep(2) or "slept"))
        with joint_work(group) as work:
            for _ in range(20 * group.rank):
                time.sleep(0.1)
                work.goes_on()
        for culprit, error in enumerate(FAILURES):
            try:
                with joint_work(group) as work:
                    if group.rank == culprit % 2:
                        raise error
            except Exception as failure:
                told.append((type(failure).__name__, str(failure), failure is error))
        # those who hear of several errors keep their own
        try:
            with joint_work(group) as work:
                raise KeyError(group.rank)
        except KeyError as failure:
            told.append(failure.args)
    return told


def test_nobody_waits_too_long_and_errors_reach_all(tmp_path):
    first, second = results(2, tmp_path, work_for_long)
    assert first[0] == "slept"
    first = first[1:]
    text = "[Errno 13] Permission denied: 'x'"
    assert first == [
        ("ValueError", "too few\n\nhint: give more", True),
        ("FileNotFoundError", "worker 1: no file x", False),
        ("PermissionError", text, True),
        ("RuntimeError", "worker 1: MemoryError", False),
        (0,),
    ]
    assert second == [
        ("ValueError", "worker 0: too few\n\nhint: give more", False),
        ("FileNotFoundError", "no file x", True),
        ("OSError", f"worker 0: {text}", False),
        ("MemoryError", "", True),
        (1,),
    ]


def test_one_worker_waits_for_nobody():
    group = Group(timeout_s=SIGNS * 1e-3)
    with joint_work(group) as work:
        assert work.meanwhile(lambda: time.sleep(0.01) or 5) == 5
        work.goes_on()
    with pytest.raises(ValueError, match="wrong"), joint_work(group):
        raise ValueError("wrong")
