"""Compute the outputs of a model for seeds of a heterogeneous graph, in minibatches.

The seeds are divided into the same minibatches for any number of workers.

Notation: M seeds.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.embedding import EmbeddingTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.models.hetero import HeteroModel
from gcnzc.sampling.hetero import HeteroBatch
from gcnzc.sampling.link import LinkSampler
from gcnzc.train.build import build_hetero_sampler, choose_fanouts
from gcnzc.train.config import TrainConfig
from gcnzc.train.node_outputs import Evaluated, Spans, minibatch_outputs

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


def typed_outputs(
    of: Evaluated,
    config: TrainConfig,
    graph: Graph,
    embeddings: Mapping[str, EmbeddingTable],
    seeds: tuple[str, Tensor],
    *,
    layer: int | None = None,
    fanouts: Sequence[int] | None = None,
    times: Tensor | None = None,
) -> Tensor:
    """Compute the outputs of a model, or of one of its layers, for nodes of one type.

    Args:
        of: the encoder, and the features by node type.
        config: options of the run.
        graph: for message passing.
        embeddings: of the node types without features.
        seeds: node type, and (M,) ids.
        layer: number of the layer, from 1; None for the outputs of the model.
        fanouts: neighbours per node and edge type, input layer first; None for all.
        times: (M,) times of the nodes, for a temporal run. Default: their own.

    Returns:
        (M, columns) on the host, as `hetero_outputs`.
    """
    encoder: HeteroModel = of.model
    num_layers, node_type = len(encoder.layers), seeds[0]
    is_last = layer is None or (layer == num_layers and not encoder.output_linears)

    def compute(batch: HeteroBatch) -> Tensor:
        x = with_embeddings(batch, embeddings)
        if layer is not None:
            return encoder.layer_outputs(batch.blocks, x, node_type)
        rows: Any = encoder(batch.blocks, x)
        outputs: Tensor = rows if isinstance(rows, Tensor) else rows[node_type]
        return outputs

    loader = Loader(
        graph,
        of.table.tables,
        seeds,
        (),
        WHOLE_SEEDS if fanouts is None else SAMPLED_SEEDS,
        sampler=build_hetero_sampler(config, graph, choose_fanouts(fanouts, num_layers)[:layer]),
        seed_times=times,
        device=of.device,
        threads=config.loading.threads or None,
        may_be_empty=True,
    )
    return hetero_outputs(of, loader, compute, encoder.out_features if is_last else encoder.hidden)


def pair_outputs(
    of: Evaluated,
    config: TrainConfig,
    sampler: LinkSampler,
    batch_size: int,
    embeddings: Mapping[str, EmbeddingTable],
) -> Tensor:
    """Compute the logits of the pairs of a sampler, and of their negatives.

    Args:
        of: the model of pairs, and the features by node type.
        config: options of the run.
        sampler: of M pairs.
        batch_size: pairs of a minibatch, without negatives.
        embeddings: of the node types without features.

    Returns:
        (M, 1 + negatives) on the host, as `hetero_outputs`.
    """
    num_negatives = sampler.num_negatives

    def compute(batch: HeteroBatch) -> Tensor:
        assert batch.items is not None, "set by the loader"
        logits = of.model(batch.blocks, with_embeddings(batch, embeddings), batch.pairs)
        count = len(batch.items)
        return torch.cat([logits[:count, None], logits[count:].view(count, num_negatives)], dim=1)

    loader = Loader(
        sampler.graph,
        of.table.tables,
        None,
        (),
        batch_size,
        sampler=sampler,
        device=of.device,
        threads=config.loading.threads or None,
    )
    return hetero_outputs(of, loader, compute, 1 + num_negatives)


def hetero_outputs(
    of: Evaluated,
    loader: Loader,
    compute: Callable[[HeteroBatch], Tensor],
    num_columns: int,
) -> Tensor:
    """Compute the outputs of all seeds of a loader, in the order of the seeds.

    Neighbours are sampled as in epoch 0, so that the model is compared on the same neighbourhoods
    in all evaluations.

    Args:
        of: whose outputs they are.
        loader: its `batch_size` is that of the minibatches; it is the same on all workers.
        compute: `compute(batch)` returns the (S, num_columns) outputs of a minibatch.
        num_columns: columns of the outputs.

    Returns:
        (M, num_columns) on the host, the same on all workers; those of a machine share the memory.
    """
    seeds: Any = loader.seeds

    def compute_all(spans: Spans) -> Generator[Tensor, None, None]:
        batches = loader.batches_of((seeds[begin:end] for begin, end in spans), epoch=0)
        with closing(batches):
            for batch in batches:
                yield compute(batch)

    return minibatch_outputs(of, (len(seeds), num_columns), loader.shares.batch_size, compute_all)
