"""Exchanges of all ranks: a compressed mean."""

from abc import abstractmethod

from torch import Tensor

from gcnzc.compress import Compression, Dense
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm
from gcnzc.optim.strategy.finite_mean import (
    Reduction,
    complete_mean,
    prepare_mean,
    reduce,
)
from gcnzc.optim.strategy.recipe import Exchange, Update
from gcnzc.optim.strategy.strategy import Strategy


class Collective(Exchange):
    """An exchange of all ranks."""

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
