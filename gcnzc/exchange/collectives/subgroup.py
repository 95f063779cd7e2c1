"""Collectives of some ranks of a group: the request `Subgroup`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gcnzc.exchange.requests import (
    Algorithm,
    BaseRequest,
    Collective,
    HeaderFields,
    Receive,
    Request,
    Send,
    Start,
)


@dataclass(eq=False, slots=True)
class Subgroup(BaseRequest):
    """Make a collective among some ranks of the group; the answer is that of the collective.

    Only these ranks make the request, and the others are not involved. In the collective they have
    the ranks 0, 1, ... in the order of `ranks`; so the `root` of a `Broadcast` and the `peer` of a
    `SendReceive` are indices of `ranks`. The collective consists of messages of the group, without
    a process group of its own; tensors on a GPU are copied through host memory, also with the
    backend "nccl". `Group.subgroup` creates a process group instead.
    """

    ranks: Sequence[int]
    """ranks of the group, the same list on all of them"""
    request: Collective
    """the same on all of these ranks"""

    @property
    def name(self) -> str:
        """The name of the collective, for the ledger."""
        return self.request.name

    def describe(self) -> str:
        """Describe the collective and its ranks, for error messages."""
        return f"{self.request.describe()} in {self._describe_ranks()}"

    @property
    def is_on_gpu(self) -> bool:
        """Whether the tensors of the collective are on a GPU."""
        return self.request.is_on_gpu

    def check(self, rank: int, world_size: int) -> None:
        """Check the ranks, and the collective.

        Raises:
            ValueError: `rank` is missing, a rank occurs twice or is not in the group, or the
                collective is invalid for that number of ranks.
        """
        ranks = list(self.ranks)
        is_valid = all(0 <= each < world_size for each in ranks)
        if rank not in ranks or len(set(ranks)) < len(ranks) or not is_valid:
            raise ValueError(
                f"rank {rank} of {world_size} requests {self.name} in {self._describe_ranks()}\n\n"
                "hint: only ranks of the list make the request; each is listed once, and valid "
                f"ranks are 0 to {world_size - 1}"
            )
        self.request.check(len(ranks))

    def sequence(self, channel: str) -> str:
        """Return the name of the sequence of the collectives of these ranks on a channel."""
        return _name_sequence(tuple(self.ranks), channel)

    def describe_header(self) -> HeaderFields:
        """Describe the collective and its ranks for the header, with peers in the group."""
        words, sent, expected = self.request.describe_header()
        ranks = self.ranks
        return (
            f"{words} in {self._describe_ranks()}",
            {ranks[peer]: size for peer, size in sent.items()},
            {ranks[peer]: size for peer, size in expected.items()},
        )

    def messages(self, name: str, rank: int, request: Collective | None = None) -> Algorithm[Any]:
        """Execute the collective by point-to-point messages, and return its answer.

        Args:
            name: an algorithm of the collective.
            rank: this rank of the group.
            request: the collective with tensors on the host; None uses that of this request.
        """
        ranks = self.ranks
        algorithm = (request or self.request).messages(name, ranks.index(rank), len(ranks))
        answer: Any = None
        while True:
            try:
                step = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield _with_rank_of_group(step, ranks)

    def _describe_ranks(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"


@lru_cache(maxsize=1024)
def _name_sequence(ranks: tuple[int, ...], channel: str) -> str:
    return f"collectives of ranks {', '.join(map(str, ranks))} on channel {channel or 'default'}"


def _with_rank_of_group(request: Request, ranks: Sequence[int]) -> Request:
    """Return a message of the collective with its peer's rank in the group."""
    if isinstance(request, Start) and isinstance(request.request, BaseRequest):
        return Start(_with_rank_of_group(request.request, ranks))
    if isinstance(request, Send):
        return Send(request.values, ranks[request.peer])
    if isinstance(request, Receive):
        return Receive(request.values, ranks[request.peer])
    return request
