"""Compute the outputs of a model for nodes from sampled neighbourhoods.

The nodes are divided into the same minibatches for any number of workers.

Notation: M requested nodes.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.layerwise.layer import gather_rows
from gcnzc.train.minibatch_outputs import Spans, minibatch_outputs

# independent of the number of workers, as minibatches determine how outputs are rounded
SAMPLED_NODES = 1024


def sampled_inference(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device,
    *,
    nodes: Tensor,
    fanouts: Sequence[int],
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the logits of nodes from sampled neighbourhoods.

    The model runs in evaluation mode; its mode is restored afterwards. The sampled neighbours of a
    node depend only on the graph, the seed and the fanouts, so that two models, or the model in two
    epochs, are compared on the same neighbourhoods.

    Args:
        model: a model on `device`.
        graph: the whole graph, with N nodes.
        table: (N, in_features) features, on the host or on `device`.
        device: device of the computation.
        nodes: (M,) int64 node ids, on the host.
        fanouts: neighbours per node, one number per layer, input layer first; -1 takes all.
        seed: random seed of the sampling.
        progress: called with (done, total) of the nodes that this worker computes.
        group: the workers among which the nodes are divided; all pass the same arguments. Default:
            this process only.

    Returns:
        (M, columns) on the host, the same on all workers; those of one machine share the memory.
    """
    sampler, dtype = Sampler(graph, fanouts, seed), parameter_dtype(model)

    def compute(spans: Spans) -> Generator[Tensor, None, None]:
        for begin, end in spans:
            # a minibatch must not have a node twice
            seeds, places = nodes[begin:end].unique(return_inverse=True)
            batch = sampler.sample(seeds, epoch=0)
            x = gather_rows(table, batch.nodes, device, dtype)
            logits = model([block.to(device) for block in batch.blocks], x)
            yield logits[places.to(device)]

    shape = len(nodes), model.out_features
    return minibatch_outputs(model, shape, SAMPLED_NODES, compute, progress, group)
