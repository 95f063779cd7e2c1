"""All-gather: the requests `AllGather` and `AllGatherScalar`, by doubling and a ring."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.exchange.collectives.messages import as_bytes, send_and_wait, start_receive
from gcnzc.exchange.collectives.one_tensor import TensorCollective, check_contiguous
from gcnzc.exchange.requests import BUILTIN, Algorithm, Collective, HeaderFields, Paths

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives
    from gcnzc.exchange.staging import StagingBuffers


@dataclass(eq=False, slots=True)
class AllGather(TensorCollective):
    """All-gather; the answer is (W, n), with one row per rank."""

    values: Tensor
    """(n,), contiguous, with the same size and dtype on all ranks"""

    kind = "AllGather"
    algorithms = ("doubling", "ring", BUILTIN)

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous."""
        check_contiguous(self)

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[Tensor]:
        """Gather the values of all ranks by point-to-point messages."""
        values = self.values
        rows = yield from _ALGORITHMS[name](as_bytes(values), rank, world_size)
        return rows.view(-1).view(values.dtype).view(world_size, *values.shape)

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, the same for all algorithms."""
        return (world_size - 1) * self.num_bytes

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], Tensor]]:
        """Start the all-gather of the process group."""
        values, world_size = as_bytes(self.values), process_group.world_size
        rows = values.new_empty(world_size * len(values))
        work = process_group.all_gather(rows, values)
        shape = (world_size, *self.values.shape)
        return work, lambda: rows.view(self.values.dtype).view(shape)

    @classmethod
    def critical_paths(cls, num_bytes: int, world_size: int) -> Paths:
        """Return the costs of doubling and of the process group's ring."""
        others = world_size - 1
        return {
            "doubling": (others.bit_length(), others * num_bytes),
            BUILTIN: (2 * others, others * num_bytes),
        }


@dataclass(slots=True)
class AllGatherScalar(Collective):
    """All-gather of a number; the answer is a tuple of W numbers, in the order of ranks."""

    value: int | float
    """sent as int64 or float64; of the same type on all ranks"""

    kind = "AllGatherScalar"
    algorithms = ("doubling",)

    @property
    def num_bytes(self) -> int:
        """The bytes of an int64 or float64."""
        return 8

    def check(self, world_size: int) -> None:
        """Check that the value is a number that int64 or float64 can represent."""
        value = self.value
        is_valid = isinstance(value, Real)
        if isinstance(value, Integral):
            is_valid = -(1 << 63) <= int(value) < 1 << 63
        if not is_valid:
            raise ValueError(
                f"AllGatherScalar of {type(value).__name__} {value!r}\n\n"
                "hint: give a float, or an integer of 64 bits"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the dtype, which must be the same on all ranks."""
        dtype = "float64" if isinstance(self.value, float) else "int64"
        return f"AllGatherScalar of {dtype}", {}, {}

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[tuple[int | float, ...]]:
        """Gather the numbers of all ranks by point-to-point messages."""
        rows = yield from doubling_gather(self._to_tensor(), rank, world_size)
        return tuple(rows[:, 0].tolist())

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends."""
        return (world_size - 1) * self.num_bytes

    def copy_to_host(self, buffers: "StagingBuffers") -> "AllGatherScalar":
        """Return the request, which has no tensor."""
        return self

    def copy_answer(self, answer: Any) -> Any:
        """Return the answer, which has no tensor."""
        return answer

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], tuple[int | float, ...]]]:
        """Start the all-gather of the process group."""
        value = self._to_tensor()
        rows = value.new_empty(process_group.world_size)
        work = process_group.all_gather(rows, value)
        return work, lambda: tuple(rows.tolist())

    def _to_tensor(self) -> Tensor:
        """Return the number as (1,) int64 or float64."""
        dtype = torch.float64 if isinstance(self.value, float) else torch.int64
        return torch.tensor([self.value], dtype=dtype)


def doubling_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) in ⌈log2 W⌉ rounds, each of which doubles the gathered rows.

    Source: Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997.
    """
    # row i belongs to rank `rank + i` until the rows are rolled at the end
    rows = values.new_empty(world_size, len(values))
    rows[0] = values
    rounds = []
    gathered = 1
    while gathered < world_size:
        count = min(gathered, world_size - gathered)
        before, after = (rank - gathered) % world_size, (rank + gathered) % world_size
        receive = yield from start_receive(rows[gathered : gathered + count], after)
        rounds.append((rows[:count], before, receive))
        gathered += count
    for sent, peer, receive in rounds:
        yield from send_and_wait(sent, peer, receive)
    return rows.roll(rank, 0)


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) around a ring, one row per round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    receives = []
    for turn in range(1, world_size):
        receives.append((yield from start_receive(rows[(rank - turn) % world_size], before)))
    for turn, receive in enumerate(receives):
        yield from send_and_wait(rows[(rank - turn) % world_size], after, receive)
    return rows


_ALGORITHMS = {
    "doubling": doubling_gather,
    "ring": ring_gather,
    # as in gloo
    BUILTIN: ring_gather,
}
