import dataclasses
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from exchange.cases import answer_everything, everything, exchange_until, stop_while_joining
from processes import results, talk, workers

from gcnzc.exchange import (
    AllGatherScalar,
    Choices,
    Mean,
    Start,
    Sum,
    Wait,
    WorkerLost,
    current_group,
    init_group,
    lockstep,
    run,
)
from gcnzc.exchange.choices import ALGORITHMS, BUILTIN

OURS = [
    {"Sum": "doubling", "Broadcast": "chain", "AllGather": "doubling"},
    {"Sum": "halving", "Broadcast": "binomial", "AllGather": "ring"},
    {"Sum": "ring"},
]
ALL_BUILTIN = {kind: BUILTIN for kind, names in ALGORITHMS.items() if BUILTIN in names}


def same(one, other):
    if isinstance(one, tuple):
        return one == other
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    flat = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


@pytest.mark.parametrize(("world_size", "names"), list(zip((2, 3, 5), OURS, strict=True)))
def test_processes_answer_as_lockstep_does(world_size, names, tmp_path):
    found = results(world_size, tmp_path, answer_everything, names)
    expected = lockstep(
        [everything(rank, world_size) for rank in range(world_size)],
        choices=Choices.always(**names),
    )
    for rank, (answers, ledger, made, made_later) in enumerate(found):
        assert all(map(same, answers, expected.results[rank]))
        twice = dataclasses.asdict(expected.ledgers[rank])["entries"]
        for kind, entry in ledger["entries"].items():
            # what the process group does by itself has no messages of ours
            if names.get(kind) or kind not in ALL_BUILTIN:
                assert entry["bytes_sent"] == 2 * twice[kind]["bytes_sent"], kind
            assert entry["requests"] == 2 * twice[kind]["requests"], kind
        # memory to work in is kept
        assert made == made_later


def test_the_builtin_ones_answer_the_same(tmp_path):
    found = results(3, tmp_path, answer_everything, ALL_BUILTIN)
    expected = lockstep([everything(rank, 3) for rank in range(3)]).results
    for rank, (answers, ledger, *_) in enumerate(found):
        for answer, right in zip(answers, expected[rank], strict=True):
            if isinstance(answer, tuple):
                assert answer == right
            elif answer.dtype in (torch.float32, torch.float64):
                torch.testing.assert_close(answer, right)
            else:
                assert same(answer, right)
        assert ledger["entries"]["Sum"]["bytes_sent"] > 0


def test_one_worker_alone_asks_nobody():
    with init_group() as group:
        assert (group.rank, group.world_size, group.watch) == (0, 1, None)
        found = run(everything(0, 1), group)
        assert group.ledger.bytes_sent == 0
    for answer, right in zip(found, lockstep([everything(0, 1)]).results[0], strict=True):
        assert same(answer, right)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("killed", "worker 1 on .* gives no sign of life"),
        ("stopped", "worker 1 on .* gives no sign of life; it was last in step 20, at sampling"),
        ("slow", "worker 1 on .* is alive|all other workers are alive"),
    ],
)
def test_a_missing_worker_is_named_in_time(what, message, tmp_path):
    began = time.monotonic()
    with workers(3, tmp_path, exchange_until, what) as processes:
        for rank in (0, 2):
            processes[rank].join(60)
            assert processes[rank].exitcode == 1
        assert time.monotonic() - began < 40
    talks = [talk(tmp_path, rank) for rank in (0, 2)]
    # who comes late hears it of the first
    assert any(re.search(message, each) for each in talks), talks
    for each in talks:
        assert re.search(message, each) or "left: worker 1" in each, each
        assert "step 20 for Mean of 40 bytes" in each
        # no command of gcnzc runs here
        assert "hint: start all workers again, and load the state_dict() and the model" in each
        assert "--resume" not in each


def test_a_worker_that_stops_while_it_joins_is_named_in_time(tmp_path):
    began = time.monotonic()
    with workers(3, tmp_path, stop_while_joining) as processes:
        for rank in (0, 2):
            processes[rank].join(60)
            assert processes[rank].exitcode == 1
        assert time.monotonic() - began < 40
    for rank in (0, 2):
        said = talk(tmp_path, rank)
        assert f"WorkerLost: worker {rank} of 3 waited" in said
        assert re.search("worker 1 (never came|on .* gives no sign of life)", said), said
        assert not re.search(r"worker [02] (never came|on \S+ gives no)", said), said


def ask(request):
    return (yield request)


def begin(request):
    return (yield Wait((yield Start(request))))


def count_watches():
    return sum(thread.name == "gcnzc-watch" for thread in threading.enumerate())


def fail_to_connect():
    """What is said where rank 1 cannot make a process group, and where it cannot join."""
    rank, new_group = int(os.environ["RANK"]), dist.new_group

    def fail(*_, **__):
        raise RuntimeError("too many open sockets")

    messages, watches = [], []
    with init_group(timeout_s=4) as group:
        if rank == 1:
            dist.new_group = fail
        for deed in (
            lambda: run(begin(AllGatherScalar(0)), group),
            lambda: group.subgroup([0, 1]),
        ):
            try:
                deed()
            except (WorkerLost, RuntimeError) as error:
                messages.append(f"{type(error).__name__}: {error}")
            watches.append(count_watches())
        dist.new_group = new_group
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    try:
        with init_group(timeout_s=4):
            pass
    except WorkerLost as error:
        messages.append(f"{type(error).__name__}: {error}")
    return messages, watches, count_watches()


def test_a_group_that_cannot_be_made_says_why_on_all_ranks_and_leaves_no_thread(tmp_path):
    for messages, watches, watches_later in results(2, tmp_path, fail_to_connect):
        beside, part, joining = messages
        assert re.match("WorkerLost: worker . waited .*too many open sockets", beside), beside
        assert re.match("WorkerLost: rank . could not create the subgroup of ranks", part), part
        # gloo's words
        assert re.match("WorkerLost: worker . of 2 waited .*nowhere0", joining), joining
        assert (watches, watches_later) == ([0, 0], 0)


def use_a_closed_group():
    """The error of a request, or one begun, to a group that rank 1 has closed, on each rank."""
    found = []
    with init_group(timeout_s=20) as whole:
        for program in (ask(AllGatherScalar(0)), begin(AllGatherScalar(0))):
            group = whole.subgroup([0, 1])
            run(begin(AllGatherScalar(0)), group)
            if group.rank == 1:
                group.close()
            try:
                run(program, group)
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
                # connections end with the process
                group.close()
        # rank 0 waits for answers
        run(ask(AllGatherScalar(0)), whole)
    return found


def test_a_closed_group_refuses_requests_with_a_remedy(tmp_path):
    with workers(2, tmp_path, use_a_closed_group) as processes:
        for process in processes:
            process.join(60)
            assert process.exitcode == 0, talk(tmp_path, 0) + talk(tmp_path, 1)
    waiting, closed = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for text in closed:
        assert re.match(
            "RuntimeError: rank 1 requests (the start of )?AllGatherScalar of 8 b", text
        )
        assert "of a group that is closed\n\nhint: call finalize()" in text
    for text in waiting:
        assert re.match("WorkerLost: worker 0 waited .* its group is closed", text), text


def sum_or_mean(rank):
    return ask((Mean if rank else Sum)(torch.ones(2)))


def late(rank):
    """A request for which rank 0 waits for so long that it looks what rank 1 does."""
    time.sleep(1.5 * rank)
    return ask(Sum(torch.ones(2)))


def find_present_group():
    """Whether `current_group` gives the same group, and how many threads write signs of life."""
    with init_group(timeout_s=20) as whole:
        rank, counts = whole.rank, [count_watches()]
        group = current_group()
        is_same = current_group() is group and current_group() is group
        counts.append(count_watches())
        # each subgroup has an exchange of its own, whatever became of the one before
        first, error = group.subgroup([0, 1]), ""
        try:
            run(sum_or_mean(rank), first)
        except RuntimeError as mismatch:
            error = str(mismatch)
        first.close()
        total = run(late(rank), current_group().subgroup([0, 1])).tolist()
        group.close()
        is_new = current_group() is not group
        total += run(late(rank), current_group()).tolist()
        counts.append(count_watches())
    # the process group is destroyed
    counts.append(count_watches())
    with init_group(timeout_s=20):
        total += run(late(rank), current_group()).tolist()
        counts.append(count_watches())
    return is_same, is_new, counts, error, total


def test_the_present_group_is_one_as_long_as_the_process_group_is(tmp_path):
    for is_same, is_new, counts, error, total in results(2, tmp_path, find_present_group):
        assert (is_same, is_new) == (True, True)
        # of `init_group`, and of `current_group`
        assert counts == [1, 2, 2, 0, 2]
        assert "requests (Sum|Mean) of 2 float32" in error or "do not match" in error
        assert total == [2.0] * 6
