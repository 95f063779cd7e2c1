"""Keep the replicas of a model on W ranks in sync: broadcasts, buffers and consistency checks.

These are algorithms for `run` and `lockstep`, independent of graphs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, AllToAll, Broadcast, Mean
from gcnzc.exchange.engine import hash_lines

T = TypeVar("T", bound=Tensor)

_HINT = "all ranks must run the same program with the same options"


def group_by_dtype(named: Iterable[tuple[str, T]]) -> list[list[tuple[str, T]]]:
    """Group named tensors by dtype and device, each tensor once, in their order."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, T]]] = {}
    seen = set()
    for name, parameter in named:
        # a tied parameter has several names
        if id(parameter) not in seen:
            seen.add(id(parameter))
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(groups.values())


def describe_layout(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Describe tensors by what must be the same on all ranks; return a line for each tensor."""
    return [
        f"{name}\t{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
        f"{'' if tensor.requires_grad else ' without gradient'}"
        for name, tensor in named
    ]


def broadcast(tensors: Sequence[tuple[str, Tensor]]) -> Algorithm[None]:
    """Broadcast tensors from rank 0, with one collective for each dtype and device.

    Args:
        tensors: names and tensors, which are overwritten; with the same shapes and dtypes, in the
            same order, on all ranks.
    """
    for same_dtype in group_by_dtype(tensors):
        yield from _broadcast([tensor for _, tensor in same_dtype])


def check_same(lines: Sequence[str]) -> Algorithm[None]:
    """Check that `lines` are equal on all ranks; if they are, each rank sends only a hash (8 B).

    Args:
        lines: this rank's lines; see `find_difference`.

    Raises:
        ValueError: they differ; raised on all ranks. The message has the first line that differs.
    """
    hashes = yield AllGatherScalar(hash_lines(lines))
    if len(set(hashes)) > 1:
        texts = yield from all_gather_text("\n".join(lines))
        difference = find_difference(dict(enumerate(texts)), {"": _HINT})
        raise ValueError(difference or f"ranks have another order of parameters\n\nhint: {_HINT}")


def find_difference(texts: Mapping[int, str], hints: Mapping[str, str]) -> str:
    """Return an error message for the first line that differs between ranks; empty if none does.

    Args:
        texts: for each rank, its lines, joined by newlines. A line is a name, a tab and a value.
        hints: by the begin of a name, the hint for lines with such a name; the first one is used.
    """
    parsed = {
        rank: dict(line.split("\t") for line in text.splitlines()) for rank, text in texts.items()
    }
    first, *others = sorted(parsed)
    for rank in others:
        for name in {**parsed[first], **parsed[rank]}:
            one, two = (parsed[each].get(name, "not set") for each in (first, rank))
            if one != two:
                hint = next(hint for start, hint in hints.items() if name.startswith(start))
                return (
                    f"{name} differs between ranks: {one} on rank {first}, {two} on rank {rank}"
                    f"\n\nhint: {hint}"
                )
    return ""


def all_gather_text(text: str) -> Algorithm[list[str]]:
    """All-gather a string, and return the strings of all ranks, in their order."""
    lengths = yield AllGatherScalar(len(data := text.encode()))
    # frombuffer needs at least one byte
    values = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    texts = yield AllToAll([values] * len(lengths), lengths)
    return [bytes(each.numpy()).decode() for each in texts]


def broadcast_bytes(data: bytes, rank: int, root: int = 0) -> Algorithm[bytes]:
    """Broadcast the bytes of rank `root`, and return them; `data` of other ranks is ignored."""
    lengths = yield AllGatherScalar(len(data))
    values = torch.empty(lengths[root], dtype=torch.uint8)
    if rank == root and data:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    yield Broadcast(values, root)
    return bytes(values.numpy())


def all_gather(values: Tensor) -> Algorithm[Tensor]:
    """All-gather a tensor (n,), and return (W, n), in the order of ranks."""
    return (yield AllGather(values))


def all_gather_scalar(value: int | float) -> Algorithm[tuple[Any, ...]]:
    """All-gather a number, and return the numbers of all ranks, in their order."""
    return (yield AllGatherScalar(value))


def dense_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the named buffers of a model, except sparse ones such as an adjacency matrix."""
    return [pair for pair in model.named_buffers() if pair[1].layout == torch.strided]


def flat_buffers(model: nn.Module) -> Tensor:
    """Return the floating-point buffers of a model, except sparse ones, as one vector of float64.

    Buffers of at most 64 bits are represented exactly.
    """
    parts = [
        buffer.detach().reshape(-1).double()
        for _, buffer in dense_buffers(model)
        if buffer.is_floating_point()
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def write_buffers(model: nn.Module, flat: Tensor) -> None:
    """Set the floating-point buffers of a model to the values of `flat_buffers`."""
    _write(flat, [buffer for _, buffer in dense_buffers(model) if buffer.is_floating_point()])


def synchronize_buffers(model: nn.Module) -> Algorithm[None]:
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
    copies = [(name, value) for (name, _), value in zip(floating, own, strict=True)]
    for same_dtype in group_by_dtype(copies):
        names = {name for name, _ in same_dtype}
        tensors = [tensor for name, tensor in floating if name in names]
        first, local = (
            torch.cat([each.reshape(-1) for each in part])
            for part in (tensors, [each for _, each in same_dtype])
        )
        base = first.masked_fill(~first.isfinite(), 0)
        is_finite = local.isfinite()
        # average differences, since the rounded mean of equal values may differ from the value
        difference = torch.where(is_finite, local - base, 0)
        sums = torch.cat([difference, is_finite.to(local.dtype)])
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
