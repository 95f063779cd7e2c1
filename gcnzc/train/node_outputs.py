"""Compute the outputs of a model for nodes, layer by layer or in minibatches.

The nodes are divided in the same way for any number of workers. Notation: M requested nodes.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.exchange import Group
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import Progress, counter, evaluation_mode, inference
from gcnzc.train.layerwise.layer import gather_rows
from gcnzc.train.layerwise.ranges import Span, assign_equal_ranges
from gcnzc.train.layerwise.store import Store

Spans: TypeAlias = Sequence[Span]

# independent of the number of workers, as minibatches determine how outputs are rounded
SAMPLED_NODES = 1024


@dataclass(frozen=True)
class Evaluated:
    """A model whose outputs are computed, and what the computation needs.

    Attributes:
        model: on `device`; it runs in evaluation mode, and its mode is restored afterwards.
        table: its input features, which the device can read: a `FeatureTable` or `TypedTables`.
        device: of the computation.
        progress: called with (done, total) of the rows that this worker computes.
        group: the workers that share the work, and get the same results. Default: this process.
    """

    model: Any
    table: Any
    device: torch.device
    progress: Progress | None = None
    group: Group = field(default_factory=Group)


def node_outputs(
    of: Evaluated,
    graph: Graph,
    nodes: Tensor | None = None,
    how: str = "needed",
    *,
    fanouts: Sequence[int] = (),
    seed: int = 0,
) -> Tensor:
    """Compute the outputs of a model for nodes of a graph of one type.

    The sampled neighbours of a node depend only on the graph, the seed and the fanouts, so that two
    models, or the model in two epochs, are compared on the same neighbourhoods.

    Args:
        of: the model, and the features of the graph.
        graph: the whole graph.
        nodes: (M,) int64 node ids, on the host; None for all nodes.
        how: which outputs of hidden layers are computed: those of all nodes ("exact"), of those
            that the nodes depend on ("needed"), or of sampled neighbours ("sampled").
        fanouts: of "sampled": neighbours per node, one number per layer, input layer first; -1
            takes all.
        seed: random seed of "sampled".

    Returns:
        (M, columns) on the host, the same on all workers; those of one machine share the memory.
    """
    model, table, device = of.model, of.table, of.device
    if how != "sampled":
        asked = nodes if how == "needed" else None
        rows = inference(
            model, graph, table, device, nodes=asked, progress=of.progress, group=of.group
        )
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

    return minibatch_outputs(of, (len(ids), model.out_features), SAMPLED_NODES, compute)


def minibatch_outputs(
    of: Evaluated,
    shape: tuple[int, int],
    batch_size: int,
    compute: Callable[[Spans], Generator[Tensor, None, None]],
) -> Tensor:
    """Compute the rows of outputs in minibatches.

    Args:
        of: whose outputs they are.
        shape: M rows, and the number of columns.
        batch_size: rows of a minibatch. It determines how outputs are rounded, so it is the same
            for any number of workers.
        compute: a generator that returns, for ranges (begin, end) of rows, the outputs of each.

    Returns:
        (M, columns) on the host, the same on all workers; those of a machine share the memory.
    """
    store = Store(of.group)
    rows = store.rows("outputs", *shape, next(of.model.parameters()).dtype)
    shares = assign_equal_ranges(shape[0], batch_size, of.group.world_size)
    spans = shares[of.group.rank]
    advance = counter(of.progress, sum(end - begin for begin, end in spans))
    with evaluation_mode(of.model), closing(compute(spans)) as outputs:
        store.compute([rows], shares, lambda begin, end: [next(outputs)], advance)
    found: Tensor = rows.tensor
    return found
