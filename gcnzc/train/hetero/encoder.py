"""Build the model and the samplers of a run on a heterogeneous graph from its options."""

from collections.abc import Sequence
from typing import Any

from gcnzc.graph.hetero.graph import HeteroGraph
from gcnzc.models.hetero import HeteroModel
from gcnzc.sampling.hetero import HeteroSampler
from gcnzc.train.build import build_hetero_gnn
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset


def build_hetero_encoder(
    config: TrainConfig, data: HeteroDataset, num_columns: int, target: str | Sequence[str]
) -> HeteroModel:
    """Build the GNN of a run on the CPU.

    Args:
        config: options of the run.
        data: the graph.
        num_columns: columns of the outputs.
        target: node types whose outputs are computed; see `gcnzc.models.RGCN`.
    """
    # types without features have trainable embeddings
    widths = dict.fromkeys(data.graph.node_types, config.model.embeddings["dim"])
    widths |= {name: table.num_columns for name, table in data.table.tables.items()}
    metadata = data.graph.metadata()
    return build_hetero_gnn(config.model, metadata, widths, num_columns, target, config.layers)


def choose_fanouts(given: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Return the given fanouts, input layer first; all neighbours of each layer if None."""
    return [-1] * num_layers if given is None else given


def build_hetero_sampler(
    config: TrainConfig, graph: HeteroGraph, fanouts: Sequence[int]
) -> HeteroSampler:
    """Build the neighbour sampler of a run.

    Args:
        config: options of the run.
        graph: the graph to sample from.
        fanouts: neighbours per node and edge type, input layer first.
    """
    temporal: Any = config.graph.temporal.name if config.graph.is_temporal else None
    return HeteroSampler(
        graph,
        # the sampler's first hop is from the seeds
        list(reversed(fanouts)),
        seed=config.loading.seed,
        temporal=temporal,
        time=config.graph.time_kind,
        edge_ids=False,
    )
