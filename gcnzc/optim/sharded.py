"""Means over the ranks of which each rank gets its shard, so that outer state is sharded too.

Notation: W ranks, n elements of the vector, s of a rank's shard, k extras.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress import Compression, Reducer, WorkerInfo
from gcnzc.exchange import Algorithm, AllGather, ReduceScatter, Sum
from gcnzc.optim.resize import shard_bounds


def padded_size(num_elements: int, world_size: int) -> int:
    """Return the number of elements of W shards, of which the last ones may be padded."""
    return shard_bounds(num_elements, 0, world_size)[1] * world_size


@dataclass(frozen=True)
class Sharded(Compression):
    """An uncompressed mean of which each rank gets its shard."""

    def reducer(self, num_elements: int, worker: WorkerInfo) -> "ShardReducer":
        """See `Compression`."""
        return ShardReducer(num_elements, worker)

    def bytes_sent(
        self, num_elements: int, world_size: int, extras: int = 0, layers: Sequence[int] = ()
    ) -> int:
        """See `Compression`; without the all-gather of what is computed from the shards."""
        others, padded = world_size - 1, padded_size(num_elements, world_size)
        return others * 4 * (padded + 2 * extras) // world_size


class ShardReducer(Reducer):
    """See `Sharded`. The vector is padded to `padded_size`; its extras follow the padding."""

    def mean(self, values: Tensor, extras: int = 0) -> Algorithm[str]:
        """See `Reducer`; the first s elements of `values` become this rank's shard of the mean."""
        world_size, rank = self.worker.world_size, self.worker.rank
        padded = len(values) - extras
        # one more message, but no copy of the vector between the extras of each shard
        self.extra_sums = (yield Sum(values[padded:])).tolist()
        summed = yield ReduceScatter(values[:padded])
        begin, end = shard_bounds(self.num_elements, rank, world_size)
        torch.div(summed[: end - begin], world_size, out=values[: end - begin])
        return ""


def gather_shards(shard: Tensor, num_elements: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather the ranks' shards (s,) of a vector, and return it (n,)."""
    sent = shard.new_zeros(padded_size(num_elements, world_size) // world_size)
    sent[: len(shard)] = shard
    return (yield AllGather(sent)).view(-1)[:num_elements]
