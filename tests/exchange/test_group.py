import dataclasses
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from collective_sizes import lockstep_by
from exchange import cases
from limits import HANG_S
from processes import results, shorten_waits, talk, workers

from gcnzc import exchange
from gcnzc.optim import LocalSGD

FLOATS = (torch.float32, torch.float64)
# collectives that the process group may execute
MAY_BE_BUILTIN = ("Sum", "Mean", "AllGather", "AllToAll", "Broadcast")


@pytest.mark.parametrize(("world_size", "way"), [(2, "messages"), (5, "messages"), (3, "builtin")])
def test_processes_get_the_same_answers_as_lockstep(world_size, way, tmp_path):
    found = results(world_size, tmp_path, cases.answer_everything, way)
    expected = lockstep_by(way, [cases.everything(rank, world_size) for rank in range(world_size)])
    for rank, (answers, ledger, made, made_later) in enumerate(found):
        for answer, right in zip(answers, expected.results[rank], strict=True):
            if way == "builtin" and getattr(answer, "dtype", None) in FLOATS:
                # gloo adds in an order of its own
                torch.testing.assert_close(answer, right)
            else:
                assert cases.same(answer, right)
        twice = dataclasses.asdict(expected.ledgers[rank])["entries"]
        for kind, entry in ledger["entries"].items():
            # collectives of the process group have no messages of gcnzc
            if kind not in MAY_BE_BUILTIN or (way == "messages" and kind != "Broadcast"):
                assert entry["bytes_sent"] == 2 * twice[kind]["bytes_sent"], kind
            assert entry["requests"] == 2 * twice[kind]["requests"], kind
        assert ledger["entries"]["Sum"]["bytes_sent"] > 0
        # buffers are reused
        assert made == made_later


def test_a_single_rank_sends_no_messages():
    with exchange.init_group() as group:
        assert (group.rank, group.world_size, group.monitor) == (0, 1, None)
        found = exchange.run(cases.everything(0, 1), group)
        assert group.ledger.bytes_sent == 0
    for answer, right in zip(
        found, exchange.lockstep([cases.everything(0, 1)]).results[0], strict=True
    ):
        assert cases.same(answer, right)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("killed", "rank 1 on .* has stopped sending heartbeats"),
        (
            "stopped",
            "rank 1 on .* has stopped sending heartbeats; it was last in step 20, at sampling",
        ),
        ("slow", "rank 1 on .* is running|all other ranks are running"),
    ],
)
def test_a_missing_rank_is_reported_without_waiting_for_it(what, message, tmp_path):
    with workers(3, tmp_path, cases.exchange_until, what) as processes:
        for rank in (0, 2):
            processes[rank].join(HANG_S)
            assert processes[rank].exitcode == 1
        assert processes[1].is_alive() == (what != "killed")
    talks = [talk(tmp_path, rank) for rank in (0, 2)]
    # the second rank to fail may report the reason of the first
    assert any(re.search(message, each) for each in talks), talks
    for each in talks:
        assert re.search(message, each) or "ended: rank 1" in each, each
        assert "step 20 for Mean of 40 bytes" in each
        # the processes are not started by a command of gcnzc
        assert "hint: start all workers again, and load the state_dict() and the model" in each
        assert "--resume" not in each


def test_a_rank_that_stops_during_the_rendezvous_is_reported(tmp_path):
    with workers(3, tmp_path, cases.stop_while_joining) as processes:
        for rank in (0, 2):
            processes[rank].join(HANG_S)
            assert processes[rank].exitcode == 1
        assert processes[1].is_alive()
    for rank in (0, 2):
        said = talk(tmp_path, rank)
        assert f"WorkerLost: rank {rank} of 3 waited" in said
        assert re.search("rank 1 (never connected|on .* has stopped sending heartbeats)", said), (
            said
        )
        assert not re.search(r"rank [02] (never connected|on \S+ has stopped)", said), said


def begin(request):
    return (yield exchange.Wait((yield exchange.Start(request))))


def count_heartbeat_threads():
    return sum(thread.name == "gcnzc-heartbeats" for thread in threading.enumerate())


def fail(*_, **__):
    raise RuntimeError("too many open sockets")


def fail_to_connect():
    """Return the errors if rank 1 cannot create a process group, or cannot connect."""
    shorten_waits()
    rank, new_group = int(os.environ["RANK"]), dist.new_group

    messages, num_threads = [], []
    with exchange.init_group(timeout_s=20) as group:
        group.timeout_s = 2
        if rank == 1:
            dist.new_group = fail
        for function in (
            lambda: exchange.run(begin(exchange.AllGatherScalar(0)), group),
            lambda: group.subgroup([0, 1]),
        ):
            try:
                function()
            except (exchange.WorkerLost, RuntimeError) as error:
                messages.append(f"{type(error).__name__}: {error}")
            num_threads.append(count_heartbeat_threads())
        dist.new_group = new_group
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    try:
        with exchange.init_group(timeout_s=3):
            pass
    except exchange.WorkerLost as error:
        messages.append(f"{type(error).__name__}: {error}")
    return messages, num_threads, count_heartbeat_threads()


def test_a_failure_to_create_a_group_is_reported_on_all_ranks_and_leaves_no_thread(tmp_path):
    for messages, num_threads, threads_later in results(2, tmp_path, fail_to_connect):
        background, subgroup, joining = messages
        assert re.match("WorkerLost: rank . waited .*too many open sockets", background), background
        assert re.match("WorkerLost: rank . could not create the subgroup of ranks", subgroup), (
            subgroup
        )
        # gloo's message
        assert re.match("WorkerLost: rank . of 2 waited .*nowhere0", joining), joining
        assert (num_threads, threads_later) == ([0, 0], 0)


def use_a_closed_group():
    """Return each rank's error of a request, and of a started one, in a group rank 1 has closed."""
    shorten_waits()
    found = []
    with exchange.init_group(timeout_s=20) as whole:
        for program in (cases.ask(exchange.AllGatherScalar(0)), begin(exchange.AllGatherScalar(0))):
            group = whole.subgroup([0, 1])
            exchange.run(begin(exchange.AllGatherScalar(0)), group)
            if group.rank == 1:
                group.close()
            try:
                exchange.run(program, group)
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
                # otherwise the connections last until the process ends
                group.close()
        # wait until rank 0 has its errors
        exchange.run(cases.ask(exchange.AllGatherScalar(0)), whole)
    return found


def test_a_closed_group_rejects_requests_with_a_remedy(tmp_path):
    with workers(2, tmp_path, use_a_closed_group) as processes:
        for process in processes:
            process.join(HANG_S)
            assert process.exitcode == 0, talk(tmp_path, 0) + talk(tmp_path, 1)
    waiting, closed = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for text in closed:
        assert re.match(
            "RuntimeError: rank 1 requests (the start of )?AllGatherScalar of 8 b", text
        )
        assert "of a group that is closed\n\nhint: call finalize()" in text
    for text in waiting:
        assert re.match("WorkerLost: rank 0 waited .* its group is closed", text), text


def sum_or_mean(rank):
    return cases.ask((exchange.Mean if rank else exchange.Sum)(torch.ones(2)))


def late(rank):
    """A request that rank 1 makes so late that rank 0 compares their requests."""
    time.sleep(0.6 * rank)
    return cases.ask(exchange.Sum(torch.ones(2)))


def use_current_group():
    """Return whether `current_group` returns the same group, and the heartbeat threads."""
    shorten_waits()
    with exchange.init_group(timeout_s=20) as whole:
        rank, counts = whole.rank, [count_heartbeat_threads()]
        group = exchange.current_group()
        is_same = exchange.current_group() is group and exchange.current_group() is group
        counts.append(count_heartbeat_threads())
        # a new subgroup works after a mismatch in an earlier one
        first, error = group.subgroup([0, 1]), ""
        try:
            exchange.run(sum_or_mean(rank), first)
        except RuntimeError as mismatch:
            error = str(mismatch)
        first.close()
        total = exchange.run(late(rank), exchange.current_group().subgroup([0, 1])).tolist()
        group.close()
        is_new = exchange.current_group() is not group
        total += exchange.run(late(rank), exchange.current_group()).tolist()
        counts.append(count_heartbeat_threads())
    # the process group is destroyed
    counts.append(count_heartbeat_threads())
    with exchange.init_group(timeout_s=20):
        total += exchange.run(late(rank), exchange.current_group()).tolist()
        counts.append(count_heartbeat_threads())
        # as the last line of a script, after which the `with` ends without an error
        dist.destroy_process_group()
    return is_same, is_new, counts, error, total


def test_the_current_group_lasts_as_long_as_the_process_group(tmp_path):
    for is_same, is_new, counts, error, total in results(2, tmp_path, use_current_group):
        assert (is_same, is_new) == (True, True)
        # one thread of `init_group`, and one of `current_group`
        assert counts == [1, 2, 2, 0, 2]
        assert "requests (Sum|Mean) of 2 float32" in error or "do not match" in error
        assert total == [2.0] * 6


def use_a_process_group_without_the_host():
    """Each kind of request with tensors of the host, as after `init_process_group("nccl")`."""
    dist.init_process_group("cuda:gloo")
    new_group = dist.new_group
    dist.new_group = fail
    with pytest.raises(exchange.WorkerLost, match=r"could not add gloo.*too many open sockets"):
        exchange.current_group()
    dist.new_group = new_group
    group = exchange.current_group()

    def program(group):
        peer = 1 - group.rank
        found = [(yield exchange.AllGatherScalar(group.rank))]
        pending = yield exchange.Start(exchange.Sum(torch.ones(3)), "background")
        found.append((yield exchange.Wait(pending)).tolist())
        pending = yield exchange.Start(exchange.Receive(torch.empty(2), peer))
        yield exchange.Send(torch.full((2,), float(group.rank)), peer)
        return *found, (yield exchange.Wait(pending)).tolist()

    subgroup = group.subgroup([0, 1])
    found = [exchange.run(program(each), each) for each in (group, subgroup)]
    parameter = torch.nn.Parameter(torch.full((2,), float(group.rank)))
    optimizer = LocalSGD(torch.optim.SGD([parameter], lr=1.0), local_steps=2)
    parameter.grad = torch.full((2,), float(group.rank))
    for _ in range(2):
        optimizer.step()
    dist.destroy_process_group()
    return found, parameter.tolist()


def test_a_process_group_of_gpus_alone_exchanges_tensors_of_the_host(tmp_path):
    answers = results(2, tmp_path, use_a_process_group_without_the_host)
    for rank, (found, parameter) in enumerate(answers):
        assert found == [((0, 1), [2.0] * 3, [1.0 - rank] * 2)] * 2
        assert parameter == [-1.0, -1.0]


def test_a_worker_of_a_launcher_without_a_process_group_is_warned(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"(?s)rank 1 of 2 trains alone.*\n\nhint: .*init_group"):
        group = exchange.current_group()
    assert group.world_size == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert exchange.current_group().world_size == 1


@pytest.mark.parametrize(
    ("rank", "world_size", "error", "message"),
    [
        (5, 2, ValueError, "rank is 5, but must be at most 1"),
        (-1, 2, ValueError, "rank is -1, but must be at least 0"),
        (0, 0, ValueError, "world_size is 0, but must be at least 1"),
        (0, 1.5, TypeError, "world_size is 1.5, not an integer"),
        ("a", 2, TypeError, "rank is 'a', not an integer"),
    ],
)
def test_a_rank_that_is_not_in_its_group_is_rejected(rank, world_size, error, message):
    with pytest.raises(error, match=f"^{message}\n\nhint: "):
        exchange.Group(rank, world_size)
