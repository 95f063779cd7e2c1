"""Compute the outputs of a model for seeds of a heterogeneous graph, in minibatches.

The seeds are divided into the same minibatches for any number of workers.

Notation: M seeds.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.features.table import FeatureTable
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler
from gcnzc.train.minibatch_outputs import Spans, minibatch_outputs

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


def node_outputs(
    model: nn.Module,
    sampler: HeteroSampler,
    seeds: tuple[str, Tensor],
    tables: Mapping[str, FeatureTable],
    compute: Callable[[nn.Module, HeteroBatch], Tensor],
    *,
    num_columns: int,
    device: torch.device,
    is_sampled: bool,
    times: Any = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute outputs for nodes of one type, in minibatches; see `hetero_outputs`.

    Args:
        model: on `device`.
        sampler: samples the neighbourhoods.
        seeds: node type, and (M,) ids.
        tables: features by node type.
        compute: `compute(model, batch)` returns the (S, num_columns) outputs of a minibatch.
        num_columns: columns of the outputs.
        device: of the computation.
        is_sampled: whether the sampler takes a sample of the neighbours, and not all.
        times: (M,) times of the nodes, for a temporal sampler. Default: their own.
        threads: of the loader.
        progress, group: see `hetero_outputs`.

    Returns:
        (M, num_columns) on the host.
    """
    loader = HeteroLoader(
        sampler,
        seeds,
        SAMPLED_SEEDS if is_sampled else WHOLE_SEEDS,
        seed_times=times,
        tables=tables,
        device=device,
        threads=threads,
        may_be_empty=True,
    )
    return hetero_outputs(model, loader, compute, num_columns, progress, group)


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
    seeds: Any = loader.seeds

    def compute_all(spans: Spans) -> Generator[Tensor, None, None]:
        batches = loader.batches_of((seeds[begin:end] for begin, end in spans), epoch=0)
        with closing(batches):
            for batch in batches:
                yield compute(model, batch)

    shape = len(seeds), num_columns
    return minibatch_outputs(model, shape, loader.shares.batch_size, compute_all, progress, group)
