"""Long work: ranks that finish wait for the others, and errors are raised on all ranks."""

import time

import pytest
from limits import NEVER_S
from processes import results

from gcnzc.exchange import Group, init_group, long_work
from gcnzc.exchange.long_work import REPORTS, joint_work

FAILURES = [
    ValueError("too few\n\nhint: give more"),
    FileNotFoundError("no file x"),
    PermissionError(13, "Permission denied", "x"),
    MemoryError(),
]


def work_for_long():
    """Work for twice the time limit of a request, in two ways; then fail."""
    found = []
    # the time between reports is that of a limit of 0.6 s, which a busy machine may exceed
    with init_group(timeout_s=NEVER_S) as group:
        long_work.REPORTS = REPORTS * NEVER_S / 0.6

        def count_reports():
            return getattr(group.ledger.entries.get("AllGatherScalar"), "requests", 0)

        def work_until_reported():
            while count_reports() < 2 * REPORTS:
                time.sleep(0.01)
            return "worked"

        with joint_work(group) as work:
            if group.rank == 0:
                found.append(work.run_in_thread(work_until_reported))
        counts = [count_reports()]
        with joint_work(group) as work:
            for _ in range(2 * REPORTS * group.rank):
                time.sleep(0.1)
                work.report_progress()
        counts.append(count_reports())
        # each wait was for one report, and not for all the work
        assert counts[0] > 2 * REPORTS
        assert counts[1] - counts[0] > 2 * REPORTS
        for culprit, error in enumerate(FAILURES):
            try:
                with joint_work(group) as work:
                    if group.rank == culprit % 2:
                        raise error
            except Exception as failure:
                found.append((type(failure).__name__, str(failure), failure is error))
        # ranks whose own work failed raise their own error
        try:
            with joint_work(group) as work:
                raise KeyError(group.rank)
        except KeyError as failure:
            found.append(failure.args)
    return found


def test_long_work_exceeds_the_time_limit_and_errors_are_raised_on_all_ranks(tmp_path):
    first, second = results(2, tmp_path, work_for_long)
    assert first[0] == "worked"
    first = first[1:]
    text = "[Errno 13] Permission denied: 'x'"
    assert first == [
        ("ValueError", "too few\n\nhint: give more", True),
        ("FileNotFoundError", "rank 1: no file x", False),
        ("PermissionError", text, True),
        ("RuntimeError", "rank 1: MemoryError", False),
        (0,),
    ]
    assert second == [
        ("ValueError", "rank 0: too few\n\nhint: give more", False),
        ("FileNotFoundError", "no file x", True),
        ("OSError", f"rank 0: {text}", False),
        ("MemoryError", "", True),
        (1,),
    ]


def test_a_single_worker_needs_no_group():
    group = Group(timeout_s=REPORTS * 1e-3)
    with joint_work(group) as work:
        assert work.run_in_thread(lambda: time.sleep(0.01) or 5) == 5
        work.report_progress()
    with pytest.raises(ValueError, match="wrong"), joint_work(group):
        raise ValueError("wrong")
