"""Keep the replicas of a model on W ranks in sync: broadcasts, buffers and consistency checks.

These are algorithms for `run` and `lockstep`, independent of graphs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, AllToAll, Broadcast, Mean
from gcnzc.exchange.layout import group_by_dtype, hash_of


def broadcast(tensors: Sequence[tuple[str, Tensor]]) -> Algorithm[None]:
    """Broadcast tensors from rank 0, with one collective for each dtype and device.

    Args:
        tensors: names and tensors, which are overwritten; with the same shapes and dtypes, in the
            same order, on all ranks.
    """
    for kind in group_by_dtype(tensors):
        yield from _broadcast([tensor for _, tensor in kind])


def check_same(lines: Sequence[str], what: str) -> Algorithm[None]:
    """Check that `lines` are equal on all ranks; if they are, each rank sends only a hash (8 B).

    Args:
        lines: of this rank.
        what: what the lines describe, for the error message.

    Raises:
        ValueError: they differ; raised on all ranks. The message has the first different line.
    """
    hashes = yield AllGatherScalar(hash_of(lines))
    if len(set(hashes)) == 1:
        return
    texts = yield from all_gather_text("\n".join(lines))
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


def all_gather_text(text: str) -> Algorithm[list[str]]:
    """All-gather a string: return the texts of all workers, in the order of ranks."""
    lengths = yield AllGatherScalar(len(data := text.encode()))
    # frombuffer needs at least one byte
    values = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    texts = yield AllToAll([values] * len(lengths), lengths)
    return [bytes(each.numpy()).decode() for each in texts]


def broadcast_bytes(data: bytes, rank: int) -> Algorithm[bytes]:
    """Broadcast the bytes of worker 0 to all workers; the `data` of others is ignored."""
    lengths = yield AllGatherScalar(len(data))
    values = torch.empty(lengths[0], dtype=torch.uint8)
    if rank == 0 and data:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    yield Broadcast(values)
    return bytes(values.numpy())


def all_gather(values: Tensor) -> Algorithm[Tensor]:
    """All-gather a tensor (n,): return (W, n), in the order of ranks."""
    return (yield AllGather(values))


def all_gather_scalar(value: int | float) -> Algorithm[tuple[Any, ...]]:
    """All-gather a number: return the numbers of all workers, in the order of ranks."""
    return (yield AllGatherScalar(value))


def dense_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and buffers of a model, without sparse ones such as a fixed adjacency matrix."""
    return [pair for pair in model.named_buffers() if pair[1].layout == torch.strided]


def synchronise_buffers(model: nn.Module) -> Algorithm[None]:
    """Make the buffers of a model equal on all ranks; sparse buffers are not changed.

    An element of a floating-point buffer, such as the running statistics of BatchNorm, becomes its
    mean over the ranks on which it is finite, so that an overflow on one rank does not affect the
    others. An element that is equal on all ranks, or finite on none, becomes rank 0's value bit for
    bit. Other buffers, such as counters, become those of rank 0.
    """
    buffers = dense_buffers(model)
    floating = [pair for pair in buffers if pair[1].dtype.is_floating_point]
    own = [tensor.detach().clone() for _, tensor in floating]
    yield from broadcast(buffers)
    copies = [(name, mine) for (name, _), mine in zip(floating, own, strict=True)]
    for kind in group_by_dtype(copies):
        names = {name for name, _ in kind}
        tensors = [tensor for name, tensor in floating if name in names]
        first, mine = (
            torch.cat([each.reshape(-1) for each in part])
            for part in (tensors, [each for _, each in kind])
        )
        base = first.masked_fill(~first.isfinite(), 0)
        is_finite = mine.isfinite()
        # differences, since the rounded mean of equal values may not be the value
        difference = torch.where(is_finite, mine - base, 0)
        sums = torch.cat([difference, is_finite.to(mine.dtype)])
        yield Mean(sums)
        mean, share = sums.chunk(2)
        _write(torch.where(share > 0, base + mean / share, first), tensors)


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
