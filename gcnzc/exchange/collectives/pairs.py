"""Exchange between pairs of ranks: the request `SendReceive`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.exchange.collectives.messages import as_bytes, send_and_wait, start_receive
from gcnzc.exchange.collectives.one_tensor import TensorCollective, check_contiguous
from gcnzc.exchange.requests import DESCRIPTIONS_KEPT, Algorithm, HeaderFields, describe_size

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives


@dataclass(eq=False, slots=True)
class SendReceive(TensorCollective):
    """Exchange of tensors between pairs of ranks; the answer is the peer's tensor."""

    values: Tensor
    """contiguous, with the same shape and dtype on both ranks"""
    peer: int
    """the other rank, whose `peer` must be this rank; if it is this rank itself, the answer is a
    copy of `values`"""

    kind = "SendReceive"
    is_from_all = False
    algorithms = ("direct",)

    def describe(self) -> str:
        """Describe the size and the peer, for error messages."""
        return f"SendReceive of {self.num_bytes:,} bytes with rank {self.peer}"

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and that the peer is one of the ranks."""
        check_contiguous(self)
        if not 0 <= self.peer < world_size:
            raise ValueError(
                f"SendReceive with rank {self.peer} of {world_size}\n\nhint: ranks start at 0"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the peer, size and dtype; pairs of ranks may differ in size and dtype."""
        return _describe(self.values.numel(), self.values.dtype, self.peer)

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[Tensor]:
        """Send the values to the peer, and return those that it sends to this rank."""
        sent = as_bytes(self.values)
        if self.peer == rank:
            received = sent.clone()
        else:
            receive = yield from start_receive(sent.new_empty(*sent.shape), self.peer)
            yield from send_and_wait(sent, self.peer, receive)
            received = receive.values
        return received.view(self.values.dtype).view(self.values.shape)

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends: 0 if it is its own peer."""
        return 0 if self.peer == rank else self.num_bytes

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], Tensor]]:
        """Start a send and a receive of the process group; nothing if the peer is this rank."""
        other = torch.empty_like(self.values)
        if self.peer == process_group.rank:
            return None, lambda: other.copy_(self.values)
        work = process_group.send_receive(self.values, other, self.peer)
        return work, lambda: other


@lru_cache(maxsize=DESCRIPTIONS_KEPT)
def _describe(num_elements: int, dtype: torch.dtype, peer: int) -> HeaderFields:
    size = describe_size(num_elements, dtype)
    return "SendReceive", {peer: size}, {peer: size}
