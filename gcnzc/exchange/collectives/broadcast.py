"""Broadcast: the request `Broadcast`, by a binomial tree and a chain."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.exchange.collectives.messages import as_bytes, copy_back
from gcnzc.exchange.collectives.one_tensor import TensorCollective
from gcnzc.exchange.requests import (
    BUILTIN,
    DESCRIPTIONS_KEPT,
    Algorithm,
    HeaderFields,
    Paths,
    Receive,
    Send,
    Start,
    Wait,
    describe_size,
)

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives

# "chain:16384" is a chain in pieces of 16384 bytes, and "chain" in those of `PIECE_BYTES`
CHAIN = "chain"
# piece size of a chain: 16 to 32 KiB are fastest at 100 Mbit/s with 2 to 8 ranks
PIECE_BYTES = 32 * 1024
# what a piece of a chain costs in addition to its bytes: the time between two messages of a sender
PIECE_OVERHEAD = 1024


@dataclass(eq=False, slots=True)
class Broadcast(TensorCollective):
    """Broadcast from one rank; the answer is `values`, written in place on the other ranks."""

    values: Tensor
    """of any shape, with the same size and dtype on all ranks"""
    root: int = 0
    """the rank that sends its values"""

    kind = "Broadcast"
    is_from_all = False
    algorithms = ("binomial", CHAIN, BUILTIN)

    def check(self, world_size: int) -> None:
        """Check that the root is one of the ranks; the values may have any strides."""
        if not isinstance(self.root, Integral) or not 0 <= self.root < world_size:
            raise ValueError(
                f"Broadcast from rank {self.root!r} of {world_size}\n\n"
                f"hint: ranks are integers from 0 to {world_size - 1}"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the size, dtype and root, which must be the same on all ranks."""
        return _describe(self.values.numel(), self.values.dtype, self.root)

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[Tensor]:
        """Send the values of the root to all ranks, by point-to-point messages."""
        flat = as_bytes(self.values)
        name, _, piece = name.partition(":")
        if name == CHAIN:
            yield from chain(flat, self.root, rank, world_size, int(piece or PIECE_BYTES))
        else:
            # gloo's own algorithm is a binomial tree, too
            yield from binomial(flat, self.root, rank, world_size)
        return copy_back(self.values, flat)

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of an algorithm."""
        size, position = self.num_bytes, (rank - self.root) % world_size
        if name.startswith(CHAIN):
            return size if position < world_size - 1 else 0
        step = 1
        while step < world_size and not position & step:
            step *= 2
        return size * sum(position + (1 << b) < world_size for b in range(step.bit_length() - 1))

    def copy_answer(self, answer: Tensor) -> Tensor:
        """Copy the answer to the values, and return them."""
        return self.values.copy_(answer)

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], Tensor]]:
        """Start the broadcast of the process group."""
        flat = as_bytes(self.values)
        work = process_group.broadcast(flat, self.root)
        return work, lambda: copy_back(self.values, flat)

    @classmethod
    def has_algorithm(cls, name: str) -> bool:
        """Whether there is an algorithm with that name, such as "chain:16384"."""
        plain, colon, piece = name.partition(":")
        if colon:
            return plain == CHAIN and piece.isdecimal() and int(piece) > 0
        return name in cls.algorithms

    @classmethod
    def critical_paths(cls, num_bytes: int, world_size: int) -> Paths:
        """Return the costs of a binomial tree and of a chain."""
        others = world_size - 1
        rounds = others.bit_length()
        num_pieces = max(num_bytes / PIECE_BYTES, 1)
        transfers = (num_pieces + others - 1) * (min(PIECE_BYTES, num_bytes) + PIECE_OVERHEAD)
        return {"binomial": (rounds, rounds * num_bytes), CHAIN: (others, transfers)}


@lru_cache(maxsize=DESCRIPTIONS_KEPT)
def _describe(num_elements: int, dtype: torch.dtype, root: int) -> HeaderFields:
    return f"Broadcast of {describe_size(num_elements, dtype)} from rank {root}", {}, {}


def binomial(values: Tensor, root: int, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Broadcast (n,) down a binomial tree: each round doubles the ranks that have the values."""
    position = (rank - root) % world_size
    step = 1
    while step < world_size and not position & step:
        step *= 2
    if position > 0:
        yield Receive(values, (rank - step) % world_size)
    step //= 2
    while step:
        if position + step < world_size:
            yield Send(values, (rank + step) % world_size)
        step //= 2
    return values


def chain(
    values: Tensor, root: int, rank: int, world_size: int, piece_bytes: int = PIECE_BYTES
) -> Algorithm[Tensor]:
    """Broadcast (n,) along a chain: each rank forwards a piece while it receives the next one."""
    position = (rank - root) % world_size
    pieces = values.split(max(piece_bytes // values.element_size(), 1))
    if world_size == 1 or not len(values):
        return values
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    receives, sends = [], []
    if position > 0:
        for piece in pieces:
            receives.append((yield Start(Receive(piece, before))))
    for index, piece in enumerate(pieces):
        if position > 0:
            yield Wait(receives[index])
        if position < world_size - 1:
            sends.append((yield Start(Send(piece, after))))
    for send in sends:
        yield Wait(send)
    return values
