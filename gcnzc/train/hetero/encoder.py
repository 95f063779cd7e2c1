"""Build the model and the samplers of a run on a heterogeneous graph from its options."""

from collections.abc import Sequence
from typing import Any

from gcnzc.models.hetero import RGCN, HeteroModel, HeteroSAGE
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
        "residual": config.residual,
        "output_linear": config.output_linear,
    }
    if config.activation != "default":
        options["activation"] = config.activation
    # types without features have trainable embeddings
    widths = dict.fromkeys(data.graph.node_types, config.embedding_dim)
    widths |= {name: table.num_columns for name, table in data.table.tables.items()}
    kind = {"rgcn": RGCN, "hetero-sage": HeteroSAGE}[config.model]
    return kind(data.graph.metadata(), widths, config.hidden, num_columns, target=target, **options)


def build_hetero_sampler(
    config: TrainConfig, data: HeteroDataset, fanouts: Sequence[int]
) -> HeteroSampler:
    """Build the neighbour sampler of a run.

    Args:
        config: options of the run.
        data: the graph.
        fanouts: neighbours per node and edge type, input layer first.
    """
    temporal = None if config.temporal == "none" else config.temporal
    return HeteroSampler(
        data.graph,
        # the sampler's first hop is from the seeds
        list(reversed(fanouts)),
        seed=config.seed,
        temporal=temporal,
        edge_ids=False,
    )
