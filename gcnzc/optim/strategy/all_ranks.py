"""Exchanges of all ranks: a compressed mean, or a mean of which each rank has a shard."""

from torch import Tensor

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, ReduceScatter
from gcnzc.optim.resize import shard_bounds
from gcnzc.optim.strategy.recipe import Exchange
from gcnzc.optim.strategy.strategy import Strategy


class AllRanks(Exchange):
    """The mean over all ranks whose vector is finite, with a compression.

    Args:
        compress: the compression.
        name: the name of the compression errors in checkpoints.
    """

    def __init__(self, compress: Compression | None = None, name: str = "mean") -> None:
        self.compress, self.name = Dense() if compress is None else compress, name

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        count = strategy.recipe.update.num_elements
        self.reducer = strategy.reducer(self.name, self.compress, count)

    def describe(self) -> str:
        """See `Exchange`."""
        return f"compress={self.compress}"

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`."""
        has_mean = yield from self.strategy.average(self.reducer, values)
        return values[: self.reducer.num_elements] if has_mean else None

    def bytes_sent(self) -> int:
        """Return the bytes that this rank sends for a mean, by formula."""
        strategy = self.strategy
        count, layers = self.reducer.num_elements, strategy.worker_info.layers
        return self.compress.bytes_sent(count, strategy.group.world_size, strategy.extras, layers)


class Shards(Exchange):
    """The mean over all ranks whose vector is finite; each rank gets its shard of it."""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        count, world_size = strategy.recipe.update.num_elements, strategy.group.world_size
        self.shard_size = shard_bounds(count, 0, world_size)[1]
        """s, elements of a shard; those of the last ranks may be smaller"""
        self.begin, self.end = shard_bounds(count, strategy.group.rank, world_size)

    def describe(self) -> str:
        """See `Exchange`."""
        return "sharded=True"

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`; the result is elements `begin` to `end` of the mean."""
        strategy, shard_size = self.strategy, self.shard_size
        count, world_size = strategy.recipe.update.num_elements, strategy.group.world_size
        strategy.prepare_mean(values)
        # a row for each rank: its shard and the extras
        rows = values.new_zeros(world_size, shard_size + strategy.extras)
        for row, part in zip(rows, values[:count].split(shard_size), strict=False):
            row[: len(part)] = part
        rows[:, shard_size:] = values[count:]
        summed = yield ReduceScatter(rows.view(-1))
        # `complete_mean` expects a mean over all ranks
        summed[:shard_size] /= world_size
        has_mean = strategy.complete_mean(summed, "")
        return summed[: self.end - self.begin] if has_mean else None
