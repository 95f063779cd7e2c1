"""Algorithms with all kinds of requests, for ranks in lockstep and in processes."""

import dataclasses
import os
import signal
import time

import torch
from collective_sizes import executed_by
from limits import NEVER_S
from processes import shorten_waits

from gcnzc import exchange


def values(rank, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=generator).to(dtype)


def in_two_rounds(rank):
    """An algorithm that is started as a whole."""
    rows = yield exchange.AllGather(values(rank, 13))
    return (yield exchange.Sum(rows.cumsum(0).contiguous()))


def everything(rank, world_size):
    """Make each kind of request, small and large, and return all answers."""
    found = []
    for count in (0, 1, 1000, 24_000):
        found.append((yield exchange.Mean(values(rank, count))))
        found.append((yield exchange.Sum(values(rank, count, torch.float64).view(1, -1))))
        found.append((yield exchange.AllGather(values(rank, count, torch.bfloat16))))
        found.append((yield exchange.AllGather(values(rank, count, torch.float8_e5m2))))
        found.append((yield exchange.Broadcast(values(rank, count), world_size - 1)))
        found.append((yield exchange.Broadcast(values(rank, 2 * count).view(-1, 2).T.bool(), 0)))
        found.append((yield exchange.ReduceScatter(values(rank, count * world_size))))
        found.append((yield exchange.SendReceive(values(rank, count), world_size - 1 - rank)))
        parts = [values(rank, count + to, torch.float64) for to in range(world_size)]
        found += yield exchange.AllToAll(parts)
        found += yield exchange.AllToAll(parts, [count + rank] * world_size)
    found.append((yield exchange.AllGatherScalar(rank - 5)))
    found.append((yield exchange.AllGatherScalar(rank / 7)))
    first = yield exchange.Start(exchange.Mean(values(rank, 5000)))
    second = yield exchange.Start(exchange.AllGather(values(rank, 50)), "other")
    third = yield exchange.Start(exchange.AllGatherScalar(rank))
    fourth = yield exchange.Start(in_two_rounds(rank), "other")
    found.append((yield exchange.Sum(values(rank, 77))))
    for pending in (third, fourth, first, second):
        found.append((yield exchange.Wait(pending)))
    if world_size == 1:
        return found
    received = torch.zeros(9)
    receive = yield exchange.Start(exchange.Receive(received, (rank - 1) % world_size))
    send = yield exchange.Start(exchange.Send(values(rank, 9), (rank + 1) % world_size))
    yield exchange.Wait(receive)
    yield exchange.Wait(send)
    found.append(received)
    return found


def ask(request):
    return (yield request)


def count_buffers(group):
    """The number of free scratch and staging buffers of all channels."""
    free = [each.buffers.free.values() for each in group.channels.values()]
    return sum(len(buffers) for each in free for buffers in each)


def same(one, other):
    """Whether two answers have the same bits."""
    if isinstance(one, tuple):
        return one == other
    are_alike = one.dtype == other.dtype and one.shape == other.shape
    flat = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return are_alike and torch.equal(*flat)


def answer_everything(way):
    """Run `everything` twice in a process; return answers, ledger and numbers of buffers."""
    with executed_by(way), exchange.init_group(timeout_s=60) as group:
        found = exchange.run(everything(group.rank, group.world_size), group)
        made = count_buffers(group)
        exchange.run(everything(group.rank, group.world_size), group)
        return found, dataclasses.asdict(group.ledger), made, count_buffers(group)


def exchange_until(what):
    """Exchange until rank 1 is killed, stopped or slow."""
    shorten_waits()
    with exchange.init_group(timeout_s=20) as group:
        group.timeout_s = 2
        for step in range(1000):
            group.set_status(step, "exchange")
            if step == 20 and group.rank == 1:
                group.set_status(step, "sampling")
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "stopped":
                    time.sleep(0.6)  # until its heartbeat has the new activity
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what == "slow":
                    time.sleep(NEVER_S)
            exchange.run(ask(exchange.Mean(torch.ones(10))), group)
            time.sleep(0.001)


def stop_while_joining():
    """Connect, but stop rank 1 after it has registered."""
    shorten_waits()
    if os.environ["RANK"] == "1":
        join = exchange.init.join_workers

        def join_and_stop(*arguments):
            join(*arguments)
            os.kill(os.getpid(), signal.SIGSTOP)

        exchange.init.join_workers = join_and_stop
    with exchange.init_group(timeout_s=3):
        pass
