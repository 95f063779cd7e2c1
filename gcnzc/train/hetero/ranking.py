"""Rank held-out edges of a heterogeneous graph among all nodes of the destination type.

Notation: E edges, U sources, N nodes of the destination type.
"""

from collections.abc import Callable, Generator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.features.table import FeatureTable
from gcnzc.models.link import Dot, HadamardMLP
from gcnzc.models.ranking import HeldOutEdges, score_ranks
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler
from gcnzc.train.hetero.edge_split import HeteroEdgeSplit
from gcnzc.train.hetero.inference import node_outputs, with_embeddings
from gcnzc.train.hetero.link_model import HeteroLinkModel
from gcnzc.train.minibatch_outputs import Spans, minibatch_outputs

# edges that a worker ranks at once; independent of the number of workers
RANKED_EDGES = 1024


def rank_among_all(
    model: HeteroLinkModel,
    split: HeteroEdgeSplit,
    name: str,
    sampler: HeteroSampler,
    tables: Mapping[str, FeatureTable],
    *,
    embeddings: Mapping[str, EmbeddingTable],
    device: torch.device,
    is_sampled: bool,
    time: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> dict[str, float]:
    """Rank the edges of a split among all nodes of the destination type, without known ones.

    The known destinations of a source are those of its training edges, and in the test split also
    those of its validation edges.

    Args:
        model: on `device`.
        split: the division of the edges.
        name: of the split whose edges are ranked: "valid" or "test".
        sampler: samples the neighbourhoods.
        tables: features by node type.
        embeddings: of the node types without features.
        device: of the computation.
        is_sampled: whether the sampler takes a sample of the neighbours, and not all.
        time: of all nodes, for a temporal sampler.
        threads: of the loader.
        progress: called with (done, total) for the sources, the destinations and the edges.
        group: the workers among which the work is divided. Default: this process only.

    Returns:
        The metrics of `gcnzc.models.ranking.score_ranks`, the same on all workers.
    """
    source, _, destination = split.edge_type
    earlier = ("train",) if name == "valid" else ("train", "valid")
    num_destinations = split.graph.num_nodes(destination)
    held_out = HeldOutEdges(
        split.edges[name],
        torch.cat([split.edges[each] for each in earlier], dim=1),
        num_destinations,
        is_one_type=source == destination,
    )

    def embed(node_type: str, nodes: Tensor) -> Tensor:
        def compute(encoder: nn.Module, batch: HeteroBatch) -> Tensor:
            outputs = encoder(batch.blocks, with_embeddings(batch, embeddings))
            return cast(Tensor, outputs[node_type])

        return node_outputs(
            model.encoder,
            sampler,
            (node_type, nodes),
            tables,
            compute,
            num_columns=model.encoder.out_features,
            device=device,
            is_sampled=is_sampled,
            times=None if time is None else torch.full((len(nodes),), time),
            threads=threads,
            progress=progress,
            group=group,
        )

    sources = embed(source, held_out.sources)
    destinations = embed(destination, torch.arange(num_destinations)).to(device)
    decoder = cast(Dot | HadamardMLP, model.decoder)

    def score(rows: Tensor) -> Tensor:
        return decoder.score_all_pairs(sources[rows].to(device), destinations).cpu()

    def compute_ranks(spans: Spans) -> Generator[Tensor, None, None]:
        yield from held_out.compute_ranks(spans, score)

    shape = held_out.edges.shape[1], 2
    ranks = minibatch_outputs(model, shape, RANKED_EDGES, compute_ranks, progress, group)
    return score_ranks(held_out.edges, ranks.double())
