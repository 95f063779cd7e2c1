"""Compute the outputs of a model for nodes, layer by layer or in minibatches.

The nodes are divided in the same way for any number of workers. Notation: M requested nodes.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import Progress, counter, evaluation_mode, inference
from gcnzc.train.layerwise.layer import gather_rows
from gcnzc.train.layerwise.ranges import assign_equal_ranges
from gcnzc.train.layerwise.workers import MemoryRows, Store, Workers

Spans: TypeAlias = Sequence[tuple[int, int]]

# independent of the number of workers, as minibatches determine how outputs are rounded
SAMPLED_NODES = 1024


def node_outputs(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device,
    nodes: Tensor | None = None,
    how: str = "needed",
    *,
    fanouts: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the outputs of a model for nodes of a graph of one type.

    The model runs in evaluation mode; its mode is restored afterwards. The sampled neighbours of a
    node depend only on the graph, the seed and the fanouts, so that two models, or the model in two
    epochs, are compared on the same neighbourhoods.

    Args:
        model: a model on `device`.
        graph: the whole graph, with N nodes.
        table: (N, in_features) features, on the host or on `device`.
        device: device of the computation.
        nodes: (M,) int64 node ids, on the host; None for all nodes.
        how: which outputs of hidden layers are computed: those of all nodes ("exact"), of those
            that the nodes depend on ("needed"), or of sampled neighbours ("sampled").
        fanouts: of "sampled": neighbours per node, one number per layer, input layer first; -1
            takes all.
        seed: random seed of "sampled".
        progress: called with (done, total) of the rows that this worker computes.
        group: the workers among which the nodes are divided; all pass the same arguments. Default:
            this process only.

    Returns:
        (M, columns) on the host, the same on all workers; those of one machine share the memory.
    """
    if how != "sampled":
        asked = nodes if how == "needed" else None
        rows = inference(model, graph, table, device, nodes=asked, progress=progress, group=group)
        return rows if asked is nodes else rows[nodes]
    ids = torch.arange(graph.num_nodes) if nodes is None else nodes
    sampler, dtype = Sampler(graph, fanouts, seed), parameter_dtype(model)

    def compute(spans: Spans) -> Generator[Tensor, None, None]:
        for begin, end in spans:
            # a minibatch must not have a node twice
            seeds, places = ids[begin:end].unique(return_inverse=True)
            batch = sampler.sample(seeds, epoch=0)
            x = gather_rows(table, batch.nodes, device, dtype)
            logits = model([block.to(device) for block in batch.blocks], x)
            yield logits[places.to(device)]

    shape = len(ids), model.out_features
    return minibatch_outputs(model, shape, SAMPLED_NODES, compute, progress, group)


def minibatch_outputs(
    model: nn.Module,
    shape: tuple[int, int],
    batch_size: int,
    compute: Callable[[Spans], Generator[Tensor, None, None]],
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the rows of outputs, with the model in evaluation mode, which is restored afterwards.

    Args:
        model: whose outputs they are.
        shape: M rows, and the number of columns.
        batch_size: rows of a minibatch. It determines how outputs are rounded, so it is the same
            for any number of workers.
        compute: a generator that returns, for ranges (begin, end) of rows, the outputs of each.
        progress: called with (done, total) of the rows that this worker computes.
        group: the workers among which the rows are divided. Default: this process only.

    Returns:
        (M, columns) on the host, the same on all workers; those of a machine share the memory.
    """
    store = Store(Workers(group or Group()))
    rows = MemoryRows(store.workers.empty(next(model.parameters()).dtype, *shape))
    shares = assign_equal_ranges(shape[0], batch_size, store.workers.count)
    spans = shares[store.workers.rank]
    advance = counter(progress, sum(end - begin for begin, end in spans))
    with evaluation_mode(model), closing(compute(spans)) as outputs:
        store.compute([rows], shares, lambda begin, end: [next(outputs)], advance)
    return rows.tensor
