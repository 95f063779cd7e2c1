"""Compare the parameters of replicas between ranks, by checksums in messages that exist already.

If one rank alone loads weights or edits a parameter, the replicas stay apart. Therefore a checksum
of the parameters is taken once in `INTERVAL` exchanges, and is one of the lines of which every
exchange sends a bit; see `Comparison`. The host reads it after the exchange, without waiting for
the device once more. If it differs, the ranks compare the parameters themselves.

Ranks with other hardware, or other numbers of threads, may round differently. Such small
differences are removed with a warning, and are no error.

Letters: W ranks, P parameters, k of them with different checksums.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, Broadcast
from gcnzc.exchange.layout import hash_of
from gcnzc.system.streams import CudaStreams

# exchanges from one checksum to the next
INTERVAL = 100
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HINT = (
    "load or change parameters in the same way on all ranks; an optimizer broadcasts those of rank "
    "0 only when it is constructed, so rank 0 alone may load weights before that"
)

Named = Sequence[tuple[str, Tensor]]


class Checksums:
    """Checksums of the parameters that must be equal on all ranks."""

    def __init__(self) -> None:
        self.line = ""
        """for the hash bits; equal on all ranks whose parameters are equal"""
        self._sums: dict[str, int] = {}
        self._names: list[str] = []
        self._pending: list[Tensor] = []  # sums of each device
        self._begun_at = -INTERVAL

    def update(self, received: int, find: Callable[[], Named | None]) -> None:
        """Read the last checksums once an exchange has come in between; take new ones if due.

        Args:
            received: the number of exchanges so far.
            find: returns names and tensors that must be equal on all ranks now; None if
                parameters differ between ranks by design now.
        """
        if self._pending and received > self._begun_at:
            # the host has read a result for which the device had to be past the copies
            self._read()
        if not self._pending and received >= self._begun_at + INTERVAL:
            named = find()
            if named:
                self._begun_at = received
                self._begin(named)
                self._pending = [_copied(each) for each in self._pending]

    def renew(self, named: Named | None) -> None:
        """Take checksums now, which waits for the device."""
        self._forget()
        if named:
            self._begin(named)
            self._read()

    def check_equal(self, named: Named | None) -> Algorithm[None]:
        """Compare the checksums of all ranks, and the parameters whose checksums differ.

        Args:
            named: names and tensors that must be equal now; those with differences by rounding
                become rank 0's.

        Raises:
            ValueError: a parameter differs by more than rounding; raised on all ranks.
        """
        if not self._sums or named is None:
            return
        sums = yield AllGather(torch.tensor(list(self._sums.values()), dtype=torch.int64))
        is_different = (sums != sums[0]).any(dim=0).tolist()
        names = {name for name, flag in zip(self._sums, is_different, strict=True) if flag}
        suspects = [pair for pair in named if pair[0] in names]
        if suspects:
            # until the next ones
            self._forget()
            yield from _demand_close(suspects)

    def _begin(self, named: Named) -> None:
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            by_device.setdefault(tensor.device, []).append((name, tensor))
        self._names = [name for pairs in by_device.values() for name, _ in pairs]
        self._pending = [
            torch.stack([_sum_of_bits(tensor) for _, tensor in pairs])
            for pairs in by_device.values()
        ]

    def _read(self) -> None:
        sums = [each for part in self._pending for each in part.tolist()]
        # in the same order on ranks whose parameters lie on other devices
        self._sums = dict(sorted(zip(self._names, sums, strict=True)))
        self._pending = []
        self.line = f"parameters\t{hash_of([str(each) for each in self._sums.values()])}"

    def _forget(self) -> None:
        self._sums, self._pending, self.line = {}, [], ""


@torch.no_grad()
def _demand_close(suspects: Named) -> Algorithm[None]:
    """Set parameters to those of rank 0 if they differ by rounding; else raise an error."""
    firsts, excess = [], []
    for _, tensor in suspects:
        first = tensor.detach().clone(memory_format=torch.contiguous_format)
        yield Broadcast(first)
        firsts.append(first)
        excess.append(_excess(tensor, first))
    # (W, k): by how much each rank's parameter differs from rank 0's, in units of rounding
    found = yield AllGather(torch.tensor(excess, dtype=torch.float64))
    is_far = ~(found <= 1)
    for place, (name, _) in enumerate(suspects):
        if ranks := is_far[:, place].nonzero().flatten().tolist():
            more = int(is_far.any(dim=0).sum()) - 1
            others = f"; {more} more differ" if more else ""
            raise ValueError(
                f"parameters differ between ranks: {name} of rank 0 is not that of "
                f"{_format_ranks(ranks)}{others}\n\nhint: {_HINT}"
            )
    for (_, tensor), first in zip(suspects, firsts, strict=True):
        tensor.copy_(first)
    warnings.warn(
        f"{len(suspects)} parameters differed between ranks by rounding, and are those of rank 0 "
        "now\n\nhint: use the same hardware, numbers of threads and implementations (foreach, "
        "fused) on all ranks",
        stacklevel=2,
    )


def _excess(tensor: Tensor, first: Tensor) -> float:
    """The largest difference of two tensors, over the largest that rounding may have caused."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0 if torch.equal(tensor, first) else float("inf")
    # of many steps; an element's own rounding is eps
    limit = torch.finfo(tensor.dtype).eps ** 0.5 * float(first.abs().max())
    difference = float((tensor.double() - first.double()).abs().max())
    return difference / limit if limit else float("inf") if difference else 0.0


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@torch.no_grad()
def _sum_of_bits(tensor: Tensor) -> Tensor:
    """() int64: the sum of a tensor's memory as integers, which is exact in any order."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    size = flat.element_size()
    places = (flat.numel() * size, flat.storage_offset() * size)
    width = next(each for each in _INTEGERS if all(place % each == 0 for place in places))
    # sums of a wider type than the elements' take a hundred times as long on a CPU
    dtype = _INTEGERS[width]
    return flat.view(dtype).sum(dtype=torch.int64 if width == 1 else dtype).long()


def _copied(values: Tensor) -> Tensor:
    """A copy on the host, valid when the device is past it; the host does not wait."""
    if values.device.type == "cpu":
        return values
    memory = CudaStreams(values.device).host_memory(values.nbytes)
    return memory.view(values.dtype).copy_(values, non_blocking=True)
