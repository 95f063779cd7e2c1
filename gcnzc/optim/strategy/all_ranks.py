"""Exchanges of all ranks: a compressed mean, or a mean that is sharded over the ranks."""

from abc import abstractmethod

from torch import Tensor

from gcnzc.compress import Compression, Dense
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, ReduceScatter, Sum
from gcnzc.optim.resize import shard_bounds
from gcnzc.optim.strategy.finite_mean import (
    Reduction,
    complete_mean,
    exclude_zeros,
    prepare_mean,
    reduce,
)
from gcnzc.optim.strategy.recipe import Exchange, Update
from gcnzc.optim.strategy.strategy import Strategy


class Collective(Exchange):
    """An exchange of all ranks, whose reduction may overlap with the local steps; see `Delayed`."""

    source: Update
    """the update whose vectors are exchanged; set before `attach` if it is not the recipe's"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        if not hasattr(self, "source"):
            self.source = strategy.recipe.vector_update

    @property
    def num_buffered(self) -> int:
        """The number of elements of the memory of an exchange, without the extras."""
        return self.source.num_elements

    @property
    def num_contributors(self) -> int:
        """The number of ranks that contribute a vector."""
        return self.strategy.group.world_size

    def prepare(self, values: Tensor) -> None:
        """Prepare this rank's vector for `reduce`; see `prepare_mean`."""
        prepare_mean(self.strategy, values)

    @abstractmethod
    def reduce(self, values: Tensor) -> Algorithm[Reduction]:
        """Reduce the vectors of all ranks after `prepare`; may overlap with compute."""

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`."""
        self.prepare(values)
        reduction = yield from self.reduce(values)
        return complete_mean(self.strategy, reduction, contributors=self.num_contributors)


class AllRanks(Collective):
    """The mean over all ranks whose vector is finite, with a compression.

    Args:
        compress: the compression.
        name: the name of the compression errors in checkpoints.
    """

    def __init__(self, compress: Compression | None = None, name: str = "mean") -> None:
        check_compression(compress)
        self.compress, self.name = Dense() if compress is None else compress, name

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.reducer = strategy.reducer(self.name, self.compress, self.source.num_elements)

    def describe(self) -> str:
        """See `Exchange`."""
        return f"compress={self.compress}"

    def reduce(self, values: Tensor) -> Algorithm[Reduction]:
        """See `Collective`."""
        return (yield from reduce(self.reducer, values, self.strategy.extras))

    def bytes_sent(self) -> int:
        """Return the bytes that this rank sends for a mean, by formula."""
        strategy = self.strategy
        count, layers = self.reducer.num_elements, strategy.worker_info.layers
        return self.compress.bytes_sent(count, strategy.group.world_size, strategy.extras, layers)


class Shards(Collective):
    """The mean over all ranks whose vector is finite; each rank gets its shard of it."""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        count, world_size = self.source.num_elements, strategy.group.world_size
        self.shard_size = shard_bounds(count, 0, world_size)[1]
        """s, the number of elements of a shard; the shards of the last ranks may be smaller"""
        self.begin, self.end = shard_bounds(count, strategy.group.rank, world_size)

    def describe(self) -> str:
        """See `Exchange`."""
        return "sharded=True"

    def reduce(self, values: Tensor) -> Algorithm[Reduction]:
        """See `Collective`; the mean is elements `begin` to `end`."""
        strategy, shard_size = self.strategy, self.shard_size
        count, world_size = self.source.num_elements, strategy.group.world_size
        # a row for each rank: its shard and the extras
        rows = values.new_zeros(world_size, shard_size + strategy.extras)
        for row, part in zip(rows, values[:count].split(shard_size), strict=False):
            row[: len(part)] = part
        rows[:, shard_size:] = values[count:]
        summed = yield ReduceScatter(rows.view(-1))
        sums = summed[shard_size:].tolist()
        mean = summed[: self.end - self.begin].div_(world_size)
        return Reduction(exclude_zeros(mean, sums, world_size), sums)


class PaddedShards(Shards):
    """`Shards` without a copy of the vector, with one more message: the extras have their own sum.

    The memory of an exchange, which `Delayed` keeps for many steps, is padded to equal shards.
    """

    @property
    def num_buffered(self) -> int:
        """See `Collective`: W shards."""
        return self.shard_size * self.strategy.group.world_size

    def reduce(self, values: Tensor) -> Algorithm[Reduction]:
        """See `Shards`."""
        padded = self.num_buffered
        sums = (yield Sum(values[padded:])).tolist()
        summed = yield ReduceScatter(values[:padded])
        count = round(sums[0])
        return Reduction(summed[: self.end - self.begin] / count if count else None, sums)
