"""All-to-all and reduce-scatter by direct messages: the requests `AllToAll`, `ReduceScatter`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.exchange.collectives.messages import as_bytes
from gcnzc.exchange.collectives.one_tensor import TensorCollective, check_contiguous
from gcnzc.exchange.requests import (
    BUILTIN,
    DESCRIPTIONS_KEPT,
    Algorithm,
    Collective,
    HeaderFields,
    Receive,
    Send,
    Start,
    Wait,
    count_bytes,
)

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives
    from gcnzc.exchange.staging import StagingBuffers


@dataclass(eq=False, slots=True)
class AllToAll(Collective):
    """All-to-all; the answer is a list of W new tensors, the parts that ranks sent to this rank."""

    parts: Sequence[Tensor]
    """W one-dimensional tensors of one dtype and of any lengths; part r is sent to rank r"""
    counts: Sequence[int] | None = None
    """the number of elements to receive from each rank; None exchanges the lengths first"""

    kind = "AllToAll"
    # the default is always direct, because each rank knows only the sizes of its own parts
    algorithms = ("direct", BUILTIN)

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(count_bytes(part) for part in self.parts)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the parts are on a GPU."""
        return self.parts[0].is_cuda

    def check(self, world_size: int) -> None:
        """Check that there is a one-dimensional tensor for each rank, and that all have one dtype.

        Args:
            world_size: W.

        Raises:
            ValueError: a part is not one-dimensional, dtypes differ, or there are not W parts or
                counts.
        """
        if len(self.parts) != world_size:
            raise ValueError(
                f"AllToAll: {len(self.parts)} parts for {world_size} ranks\n\n"
                "hint: give one part per rank, which may be empty"
            )
        for rank, part in enumerate(self.parts):
            if len(part.shape) != 1:
                raise ValueError(
                    f"AllToAll: the part for rank {rank} has the shape {tuple(part.shape)}\n\n"
                    "hint: give one-dimensional parts, such as part.reshape(-1)"
                )
        if self.counts is not None and len(self.counts) != world_size:
            raise ValueError(
                f"AllToAll: {len(self.counts)} counts for {world_size} ranks\n\n"
                "hint: give the number of elements to receive from each rank"
            )
        if len({part.dtype for part in self.parts}) > 1:
            raise ValueError(
                "AllToAll: parts of several dtypes\n\nhint: send bytes with .view(torch.uint8)"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the dtype, and the sizes sent to each peer and expected from it."""
        counts = None if self.counts is None else tuple(self.counts)
        lengths = tuple(part.numel() for part in self.parts)
        return _describe(self.parts[0].dtype, lengths, counts)

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[list[Tensor]]:
        """Exchange the parts, and before them their lengths if need be, by direct messages."""
        counts = self.counts
        if counts is None:
            lengths = [torch.tensor([len(part)]) for part in self.parts]
            received = yield from direct_exchange(lengths, [1] * world_size, rank)
            counts = [int(count) for count in received]
        dtype, size = self.parts[0].dtype, self.parts[0].element_size()
        sent = self.parts if dtype == torch.uint8 else [as_bytes(part) for part in self.parts]
        parts = yield from direct_exchange(sent, [count * size for count in counts], rank)
        # the caller may change the parts that it has sent
        parts[rank] = parts[rank].clone()
        return parts if dtype == torch.uint8 else [part.view(dtype) for part in parts]

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends to others, with the lengths if they are exchanged."""
        own = count_bytes(self.parts[rank])
        return self.num_bytes - own + (8 * (world_size - 1) if self.counts is None else 0)

    def copy_to_host(self, buffers: "StagingBuffers") -> "AllToAll":
        """Return the request with copies of the parts in buffers on the host."""
        return replace(self, parts=[buffers.copy_to_host(part) for part in self.parts])

    def copy_answer(self, answer: list[Tensor]) -> list[Tensor]:
        """Return copies of the received parts on the device of the sent ones."""
        return [part.to(self.parts[0].device) for part in answer]

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], list[Tensor]]]:
        """Start the all-to-all of the process group, after that of the lengths if need be."""
        parts, size = [as_bytes(part) for part in self.parts], self.parts[0].element_size()
        counts = self.counts
        if counts is None:
            # host tensors, so gloo exchanges them without a device synchronization
            lengths = torch.tensor([len(part) for part in self.parts])
            received_lengths = torch.empty_like(lengths)
            process_group.all_to_all(received_lengths, lengths).wait()
            counts = received_lengths.tolist()
        sizes = [count * size for count in counts]
        received = parts[0].new_empty(sum(sizes))
        work = process_group.all_to_all(
            received, torch.cat(parts), sizes, [len(part) for part in parts]
        )
        dtype = self.parts[0].dtype
        # the parts have one dtype, so they are aligned for the view
        return work, lambda: [part.view(dtype) for part in received.split(sizes)]


@dataclass(eq=False, slots=True)
class ReduceScatter(TensorCollective):
    """Reduce-scatter with a sum; the answer is (n / W,), this rank's share of the sum."""

    values: Tensor
    """(n,), contiguous; n is a multiple of W, and rank r gets share r"""

    kind = "ReduceScatter"
    algorithms = ("direct",)

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and that all shares have the same size."""
        check_contiguous(self)
        if self.values.numel() % world_size:
            raise ValueError(
                f"ReduceScatter: {self.values.numel()} elements for {world_size} ranks\n\n"
                "hint: pad the values to a multiple of the number of ranks"
            )

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[Tensor]:
        """Exchange the shares by direct messages, and add those of this rank."""
        return direct_scatter(self.values, rank, world_size)

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends: the shares of the other ranks."""
        return (world_size - 1) / world_size * self.num_bytes

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], Tensor]]:
        """Start the reduce-scatter of the process group."""
        share = self.values.new_empty(self.values.numel() // process_group.world_size)
        work = process_group.reduce_scatter(share, self.values.view(-1))
        return work, lambda: share


@lru_cache(maxsize=DESCRIPTIONS_KEPT)
def _describe(
    dtype: torch.dtype, lengths: tuple[int, ...], counts: tuple[int, ...] | None
) -> HeaderFields:
    name = str(dtype).removeprefix("torch.")
    words = f"AllToAll of {name}, counts {'not given' if counts is None else 'given'}"
    sent = {rank: f"{length} {name}" for rank, length in enumerate(lengths)}
    expected = {rank: f"{count} {name}" for rank, count in enumerate(counts or ())}
    return words, sent, expected


def direct_exchange(
    parts: Sequence[Tensor], counts: Sequence[int], rank: int
) -> Algorithm[list[Tensor]]:
    """All-to-all: send part r to rank r, and receive `counts[r]` elements from it, concurrently.

    Returns:
        The parts by rank; that of this rank is not a copy.
    """
    world_size = len(parts)
    received = [parts[rank].new_empty(count) for count in counts]
    received[rank] = parts[rank]
    pending = []
    for distance in range(1, world_size):
        before = (rank - distance) % world_size
        if counts[before]:
            pending.append((yield Start(Receive(received[before], before))))
    for distance in range(1, world_size):
        # each rank starts with another receiver, so that no rank receives all first messages
        after = (rank + distance) % world_size
        if len(parts[after]):
            pending.append((yield Start(Send(parts[after].contiguous(), after))))
    for each in pending:
        yield Wait(each)
    return received


def direct_scatter(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Reduce-scatter (n,): each rank receives its share from all others, and adds them by rank.

    Returns:
        (n / W,): the sum of this rank's share.
    """
    shares = values.view(world_size, -1)
    parts = yield from direct_exchange(list(shares), [shares.shape[1]] * world_size, rank)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
