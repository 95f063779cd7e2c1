"""Compare the parameters of the replicas between ranks by checksums, without extra messages.

If only one rank loads weights or edits a parameter, the replicas stay out of sync. Therefore a
checksum of the parameters is computed every `INTERVAL` exchanges. It is one of the lines of which
exchanges send a hash bit; see `Comparison`. The host reads the checksum after the exchange, without
another synchronization with the device. If checksums differ, the ranks compare the parameters.

Ranks with different hardware or numbers of threads may round differently. Such small differences
cause a warning, not an error, and rank 0's parameters are broadcast.

Notation: W ranks, P parameters, k of them with different checksums.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, Broadcast
from gcnzc.exchange.engine import hash_lines
from gcnzc.system.streams import CudaStreams

# exchanges from one checksum to the next
INTERVAL = 100
# elements are summed by rows and by columns; this is the number of columns
COLUMNS = 4096
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HINT = (
    "load or change parameters in the same way on all ranks; an optimizer broadcasts those of rank "
    "0 only when it is constructed, so rank 0 alone may load weights before that"
)

Named = Sequence[tuple[str, Tensor]]


class Checksums:
    """Computes checksums of the parameters, and compares them between ranks."""

    def __init__(self) -> None:
        self.line = ""
        """the line for the hash bits; equal on ranks with equal parameters"""
        self._sums: dict[str, int] = {}
        self._pending: list[tuple[list[str], Tensor]] = []  # names and sums of each device
        self._ignored: set[str] = set()  # frozen parameters that differ; the same on all ranks
        self._started_at = -INTERVAL
        self.next_update = 0
        """the number of exchanges from which `update` has something to do"""

    def update(self, received: int, find: Callable[[], Named | None]) -> None:
        """Read pending checksums if an exchange has followed them; start new ones if due.

        Args:
            received: the number of exchanges so far.
            find: returns names and tensors that must be equal on all ranks now; None if
                parameters differ between ranks by design now.
        """
        if self._pending and received > self._started_at:
            # the host has read the result of an exchange that the device computed after the copies
            self._read()
        if not self._pending and received >= self._started_at + INTERVAL:
            named = find()
            if named is not None:
                self._started_at = received
            if named:
                self._start(named)
                self._pending = [(names, _copy_to_host(sums)) for names, sums in self._pending]
        self.next_update = self._started_at + (1 if self._pending else INTERVAL)

    def renew(self, named: Named | None) -> None:
        """Compute and read the checksums now, which synchronizes with the device."""
        self._forget()
        if named:
            self._start(named)
            self._read()

    def check_equal(self, named: Named | None) -> Algorithm[None]:
        """Compare the checksums of all ranks, and the parameters whose checksums differ.

        Args:
            named: names and tensors that must be equal now. Those that differ by rounding are set
                to rank 0's.

        Raises:
            ValueError: a parameter differs by more than rounding; raised on all ranks.
        """
        if not self._sums or named is None:
            return
        sums = yield AllGather(torch.tensor(list(self._sums.values()), dtype=torch.int64))
        is_different = (sums != sums[0]).any(dim=0).tolist()
        names = {name for name, flag in zip(self._sums, is_different, strict=True) if flag}
        suspects = [pair for pair in named if pair[0] in names]
        if frozen := [name for name, tensor in suspects if not tensor.requires_grad]:
            # once, since moving averages may differ by design
            self._ignored.update(frozen)
            warnings.warn(
                f"{len(frozen)} frozen parameters differ between ranks: {', '.join(frozen[:3])}"
                "\n\nhint: load them in the same way on all ranks; they are not compared again",
                stacklevel=2,
            )
        if names:
            self._forget()
        if suspects := [pair for pair in suspects if pair[1].requires_grad]:
            yield from _check_close(suspects)

    def _start(self, named: Named) -> None:
        sums: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named:
            if name not in self._ignored:
                sums.setdefault(tensor.device, {})[name] = sum_of_bits(tensor)
        self._pending = [(list(own), torch.stack([*own.values()])) for own in sums.values()]

    def _read(self) -> None:
        pairs = [
            pair for names, sums in self._pending for pair in zip(names, sums.tolist(), strict=True)
        ]
        # the order must not depend on the devices of a rank's parameters
        self._sums, self._pending = dict(sorted(pairs)), []
        self.line = f"parameters\t{hash_lines([str(each) for each in self._sums.values()])}"

    def _forget(self) -> None:
        self._sums, self._pending, self.line = {}, [], ""
        self.next_update = self._started_at + INTERVAL


@torch.no_grad()
def _check_close(suspects: Named) -> Algorithm[None]:
    """Set parameters to those of rank 0 if they differ by rounding; else raise an error."""
    firsts, excess = [], []
    for _, tensor in suspects:
        first = tensor.detach().clone(memory_format=torch.contiguous_format)
        yield Broadcast(first)
        firsts.append(first)
        excess.append(_excess(tensor, first))
    # (W, k): the difference of each rank's parameter from rank 0's, in units of rounding
    found = yield AllGather(torch.tensor(excess, dtype=torch.float64))
    is_far = ~(found <= 1)
    for index, (name, _) in enumerate(suspects):
        if ranks := is_far[:, index].nonzero().flatten().tolist():
            more = int(is_far.any(dim=0).sum()) - 1
            others = f"; {more} more differ" if more else ""
            raise ValueError(
                f"parameters differ between ranks: {name} of rank 0 is not that of "
                f"{_format_ranks(ranks)}{others}\n\nhint: {_HINT}"
            )
    for (_, tensor), first in zip(suspects, firsts, strict=True):
        tensor.copy_(first)
    warnings.warn(
        f"{len(suspects)} parameters differed slightly between ranks, and are those of rank 0 "
        "now\n\nhint: rounding may differ; use the same hardware, numbers of threads and "
        "implementations (foreach, "
        "fused) on all ranks",
        stacklevel=2,
    )


def _excess(tensor: Tensor, first: Tensor) -> float:
    """Return the largest difference of two tensors divided by the largest due to rounding."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0 if torch.equal(tensor, first) else float("inf")
    # sqrt(eps), not eps, because rounding errors of many steps accumulate
    limit = torch.finfo(tensor.dtype).eps ** 0.5 * float(first.abs().max())
    difference = float((tensor.double() - first.double()).abs().max())
    return difference / limit if limit else float("inf") if difference else 0.0


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@torch.no_grad()
def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return a weighted sum () int64 of a tensor's memory as integers, exact in any order."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # the elements of a vector with strides are not adjacent
    flat = real.detach().reshape(-1).contiguous()
    size = flat.element_size()
    # the same for equal parameters, whatever memory they are views of
    width = next(each for each in _INTEGERS if flat.numel() * size % each == 0)
    values = (flat if flat.storage_offset() * size % width == 0 else flat.clone()).view(
        _INTEGERS[width]
    )
    # on a CPU, sums in a wider type than that of the elements take a hundred times as long
    dtype = torch.int64 if width == 1 else _INTEGERS[width]
    whole = values.numel() // COLUMNS * COLUMNS
    matrix = values[:whole].view(-1, COLUMNS)
    parts = [matrix.sum(0, dtype=dtype), matrix.sum(1, dtype=dtype), values[whole:]]
    mixed = torch.cat([part.long() for part in parts])
    # weights, so that another order of the same elements has another sum
    weights = torch.arange(1, 2 * mixed.numel(), 2, device=mixed.device)
    return (mixed * weights).sum()


def _copy_to_host(values: Tensor) -> Tensor:
    """Start a copy to the host, valid once the device has finished it; the host does not wait."""
    if values.device.type == "cpu":
        return values
    memory = CudaStreams(values.device).host_memory(values.nbytes)
    return memory.view(values.dtype).copy_(values, non_blocking=True)
