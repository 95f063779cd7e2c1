"""Copies of one model on W ranks: in sync at the start, and kept in sync.

Algorithms for `run` and `lockstep`; they know nothing of graphs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Algorithm, AllGather, AllToAll, Broadcast, Mean, Vote
from gcnzc.flat import by_kind, hash_of


def broadcast(tensors: Sequence[tuple[str, Tensor]]) -> Algorithm[None]:
    """Give all ranks the values of rank 0, in a broadcast for each dtype and device.

    Args:
        tensors: with their names; of the same shapes and dtypes, in the same order, on all ranks.
    """
    for kind in by_kind(tensors):  # type: ignore[arg-type]
        yield from _broadcast([tensor for _, tensor in kind])


def demand_same(lines: Sequence[str], what: str) -> Algorithm[None]:
    """Raise the same error on all workers if their `lines` differ; costs 8 bytes if not.

    Raises:
        ValueError: they differ; the message shows the first line that does.
    """
    hashes = yield Vote(hash_of(lines))
    if len(set(hashes)) == 1:
        return
    texts = yield from everybodys("\n".join(lines))
    mine, *others = (text.splitlines() for text in texts)
    for rank, theirs in enumerate(others, 1):
        if theirs == mine:
            continue
        place = next(
            (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(theirs)),
        )
        first, other = (
            repr(each[place]) if place < len(each) else "nothing more" for each in (mine, theirs)
        )
        raise ValueError(
            f"the {what} of workers 0 and {rank} differ: at {place}, worker 0 has {first} and "
            f"worker {rank} has {other}\n\nhint: all workers must run the same program with the "
            "same options"
        )


def everybodys(text: str) -> Algorithm[list[str]]:
    """The texts of all workers, in the order of ranks."""
    lengths = yield Vote(len(data := text.encode()))
    # a message of no bytes has no memory
    values = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    texts = yield AllToAll([values] * len(lengths), lengths)
    return [bytes(each.numpy()).decode() for each in texts]


def told(data: bytes, rank: int) -> Algorithm[bytes]:
    """The bytes of worker 0, on all workers; what others give is left aside."""
    lengths = yield Vote(len(data))
    values = torch.empty(lengths[0], dtype=torch.uint8)
    if rank == 0 and data:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    yield Broadcast(values)
    return bytes(values.numpy())


def gathered(values: Tensor) -> Algorithm[Tensor]:
    """(n,) of every worker, as (W, n)."""
    return (yield AllGather(values))


def vote(value: int | float) -> Algorithm[tuple[Any, ...]]:
    """The numbers of all workers, in the order of ranks."""
    return (yield Vote(value))


def synchronise_buffers(model: nn.Module) -> Algorithm[None]:
    """Give all ranks the same buffers.

    Those of a floating-point dtype, such as BatchNorm's averages, become their means over the ranks
    where they are finite: one whose activations overflowed does not spoil those of the others.
    Others, such as counters, become those of rank 0.
    """
    buffers = list(model.named_buffers())
    floating = [pair for pair in buffers if pair[1].dtype.is_floating_point]
    for kind in by_kind(floating):  # type: ignore[arg-type]
        tensors = [tensor for _, tensor in kind]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        is_finite = flat.isfinite()
        sums = torch.cat([flat.masked_fill(~is_finite, 0), is_finite.to(flat.dtype)])
        yield Mean(sums)
        # 0 / 0 where no rank has one
        mean, share = sums.chunk(2)
        _write(mean / share, tensors)
    yield from broadcast([pair for pair in buffers if not pair[1].dtype.is_floating_point])


def _broadcast(tensors: Sequence[Tensor]) -> Algorithm[None]:
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield Broadcast(flat)
    _write(flat, tensors)


@torch.no_grad()
def _write(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
