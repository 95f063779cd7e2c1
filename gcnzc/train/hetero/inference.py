"""Compute the outputs of a model for seeds of a heterogeneous graph, in minibatches.

The seeds are divided into the same minibatches for any number of workers.

Notation: M seeds.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.train.layerwise.ranges import assign_equal_ranges
from gcnzc.train.layerwise.workers import MemoryRows, Workers

# independent of the number of workers, as minibatches determine how outputs are rounded; those with
# all neighbours are smaller, because they have many nodes for each seed
SAMPLED_SEEDS, WHOLE_SEEDS = 1024, 256


def with_embeddings(
    batch: HeteroBatch, embeddings: Mapping[str, EmbeddingTable]
) -> dict[str, Tensor]:
    """Return the features of a minibatch, with rows of embeddings for the other node types."""
    device = batch.blocks[0].device
    rows = {name: table.gather(batch.nodes[name], device) for name, table in embeddings.items()}
    return {**(batch.x or {}), **rows}


def hetero_outputs(
    model: nn.Module,
    loader: HeteroLoader,
    compute: Callable[[nn.Module, HeteroBatch], Tensor],
    num_columns: int,
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the outputs of all seeds of a loader, in the order of the seeds.

    The model runs in evaluation mode; its mode is restored afterwards. Neighbours are sampled as in
    epoch 0, so that the model is compared on the same neighbourhoods in all evaluations.

    Args:
        model: on the device of the loader.
        loader: its `batch_size` is that of the minibatches; it is the same on all workers.
        compute: `compute(model, batch)` returns the (S, num_columns) outputs of a minibatch.
        num_columns: columns of the outputs.
        progress: called with (done, total) of the seeds that this worker computes.
        group: the workers among which the seeds are divided. Default: this process only.

    Returns:
        (M, num_columns) on the host, the same on all workers; those of a machine share the memory.
    """
    workers = Workers(group or Group())
    seeds: Any = loader.seeds
    dtype = next(model.parameters()).dtype
    rows = MemoryRows(workers.empty(dtype, len(seeds), num_columns))
    shares = assign_equal_ranges(len(seeds), loader.shares.batch_size, workers.count)
    spans = shares[workers.rank]
    done, total = 0, sum(end - begin for begin, end in spans)
    batches = loader.batches_of((seeds[begin:end] for begin, end in spans), epoch=0)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), joint_work(workers.group) as work, closing(batches):
            for (begin, end), batch in zip(spans, batches, strict=True):
                rows.write(begin, end, compute(model, batch))
                done += end - begin
                if progress is not None:
                    progress(done, total)
                work.report_progress()
    finally:
        model.train(was_training)
    workers.distribute(rows, shares)
    return rows.tensor
