"""Build the model and the samplers of a run on a heterogeneous graph from its options."""

from collections.abc import Sequence
from typing import Any

from gcnzc.graph.hetero.graph import HeteroGraph
from gcnzc.models.hetero import HGT, RGAT, RGCN, HeteroModel, HeteroSAGE
from gcnzc.sampling.hetero import HeteroSampler
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
    options: dict[str, Any] = {
        "num_layers": config.layers,
        "dropout": config.dropout,
        "input_dropout": config.input_dropout,
        "norm": config.norm,
    }
    if config.model != "hgt":
        options["output_linear"] = config.output_linear
        # R-GAT has a residual connection by default, as GAT has a skip connection
        options["residual"] = config.residual or config.model == "rgat"
        if config.activation != "default":
            options["activation"] = config.activation
    if config.model in ("rgat", "hgt"):
        options["heads"] = config.heads
    if config.model == "rgat":
        options["attention_dropout"] = config.attention_dropout
    # types without features have trainable embeddings
    widths = dict.fromkeys(data.graph.node_types, config.embedding_dim)
    widths |= {name: table.num_columns for name, table in data.table.tables.items()}
    kind = {"rgcn": RGCN, "rgat": RGAT, "hgt": HGT, "hetero-sage": HeteroSAGE}[config.model]
    return kind(data.graph.metadata(), widths, config.hidden, num_columns, target=target, **options)


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
    temporal = None if config.temporal == "none" else config.temporal
    return HeteroSampler(
        graph,
        # the sampler's first hop is from the seeds
        list(reversed(fanouts)),
        seed=config.seed,
        temporal=temporal,
        time=config.times,
        edge_ids=False,
    )
