"""The collectives of torch.distributed's process groups, which gloo or NCCL executes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcnzc.exchange.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
    as_bytes,
    from_bytes,
)
from gcnzc.exchange.errors import network

# torch 2.13 renames these functions, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Members(NamedTuple):
    """The ranks of a process group."""

    rank: int  # this rank
    ranks: list[int]  # the members' ranks in torch.distributed's default group
    group: Any  # the process group; None for the default one


def start_builtin(request: Collective, on: Members) -> tuple[Any, Callable[[], Any]]:
    """Start the process group's own collective.

    Returns:
        Its work, None if it has ended, and a function that returns the answer after that.
    """
    with network():
        return _STARTS[type(request)](request, on)


def wait_for_work(work: Any, limit_s: float | None) -> None:
    """Wait for work of torch.distributed; `limit_s` is None for NCCL, which has its own limit."""
    with network():
        if limit_s is None:
            # with a time limit, the host would poll until the device has finished
            work.wait()
        else:
            # gloo's messages have no other time limit; after a timeout the connection is closed
            work.wait(timedelta(seconds=limit_s))


def _start_all_reduce(request: AllReduce, on: Members) -> tuple[Any, Callable[[], Tensor]]:
    work = dist.all_reduce(request.values.view(-1), group=on.group, async_op=True)
    return work, lambda: request.finish(len(on.ranks))


def _start_broadcast(request: Broadcast, on: Members) -> tuple[Any, Callable[[], Tensor]]:
    flat = as_bytes(request.values)
    work = dist.broadcast(flat, on.ranks[request.root], group=on.group, async_op=True)
    return work, lambda: request.copy_back(flat)


def _start_all_gather(request: AllGather, on: Members) -> tuple[Any, Callable[[], Tensor]]:
    values, world_size = as_bytes(request.values), len(on.ranks)
    rows = values.new_empty(world_size * len(values))
    work = _all_gather(rows, values, group=on.group, async_op=True)
    shape = world_size, *request.values.shape
    return work, lambda: from_bytes(rows, request.values, *shape)


def _start_reduce_scatter(request: ReduceScatter, on: Members) -> tuple[Any, Callable[[], Tensor]]:
    share = request.values.new_empty(request.values.numel() // len(on.ranks))
    work = _reduce_scatter(share, request.values.view(-1), group=on.group, async_op=True)
    return work, lambda: share


def _start_all_to_all(request: AllToAll, on: Members) -> tuple[Any, Callable[[], list[Tensor]]]:
    """Start the all-to-all of the process group, after that of the lengths if need be."""
    parts, dtype = [as_bytes(part) for part in request.parts], request.parts[0].dtype
    counts = request.counts
    if counts is None:
        # host tensors, so gloo exchanges them without a device synchronization
        lengths = torch.tensor([len(part) for part in request.parts])
        received_lengths = torch.empty_like(lengths)
        dist.all_to_all_single(received_lengths, lengths, group=on.group)
        counts = received_lengths.tolist()
    sizes = [count * dtype.itemsize for count in counts]
    received, own = parts[0].new_empty(sum(sizes)), [len(part) for part in parts]
    work = dist.all_to_all_single(
        received, torch.cat(parts), sizes, own, group=on.group, async_op=True
    )
    # the parts have one dtype, so they are aligned for the view
    return work, lambda: [part.view(dtype) for part in received.split(sizes)]


def _start_send_receive(request: SendReceive, on: Members) -> tuple[Any, Callable[[], Tensor]]:
    """Start a send and a receive of the process group; nothing if the peer is this rank."""
    other, values = torch.empty_like(request.values), request.values
    if request.peer == on.rank:
        return None, lambda: other.copy_(values)
    both = (dist.isend, values), (dist.irecv, other)
    peer = on.ranks[request.peer]
    operations = [dist.P2POp(start, tensor, peer, on.group) for start, tensor in both]
    return dist.batch_isend_irecv(operations)[-1], lambda: other


_STARTS: dict[type[Collective], Callable[[Any, Members], tuple[Any, Callable[[], Any]]]] = {
    Sum: _start_all_reduce,
    Mean: _start_all_reduce,
    Broadcast: _start_broadcast,
    AllGather: _start_all_gather,
    ReduceScatter: _start_reduce_scatter,
    AllToAll: _start_all_to_all,
    SendReceive: _start_send_receive,
}
