"""The exchange of methods in which only some ranks take part in a round.

Notation: W ranks, k extras.
"""

import hashlib
from dataclasses import dataclass

from torch import Tensor

from gcnzc.compress import Compression
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_count


@dataclass
class Participants:
    """The ranks that take part in each round, which each rank computes without communication.

    Raises:
        ValueError: `count` is not a number from 1 on.
    """

    count: int | None = None
    """the number of ranks in a round; None for all"""
    seed: int = 0
    """random seed: the ranks are chosen by a hash of the seed, the round and the rank"""
    round: int = 0
    """the current round, equal on all ranks"""

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("participants", self.count, 1)
        check_count("seed", self.seed)

    def ranks(self, world_size: int) -> frozenset[int]:
        """Return the ranks of the current round."""
        if self.count is None:
            return frozenset(range(world_size))

        def draw(rank: int) -> bytes:
            text = f"{self.seed} {self.round} {rank}"
            return hashlib.blake2b(text.encode(), digest_size=8).digest()

        return frozenset(sorted(range(world_size), key=draw)[: self.count])

    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text."""
        return "" if self.count is None else f"participants={self.count}, seed={self.seed}"


class ParticipantsMean(AllRanks):
    """The mean over the participants of the current round whose vector is finite.

    The other ranks contribute zeros, because each rank also reduces a slice of the vector.

    Args:
        participants: the ranks of the rounds.
        compress: the compression.
        name: the name of the compression errors in checkpoints.
    """

    def __init__(self, participants: Participants, compress: Compression | None, name: str) -> None:
        super().__init__(compress, name)
        self.participants = participants

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`.

        Raises:
            ValueError: there are more participants than ranks.
        """
        super().attach(strategy)
        count, world_size = self.participants.count, strategy.group.world_size
        if count is not None and count > world_size:
            raise ValueError(
                f"{count} participants of {world_size} ranks\n\nhint: give at most the number of "
                "ranks, or None for all of them"
            )

    def describe(self) -> str:
        """See `Exchange`."""
        return ", ".join(filter(None, (self.participants.describe(), super().describe())))

    @property
    def num_contributors(self) -> int:
        """See `Collective`."""
        return len(self.participants.ranks(self.strategy.group.world_size))

    def prepare(self, values: Tensor) -> None:
        """See `Collective`."""
        super().prepare(values)
        group = self.strategy.group
        if group.rank not in self.participants.ranks(group.world_size):
            # with the flag that follows the vector
            values[: self.reducer.num_elements + 1] = 0
