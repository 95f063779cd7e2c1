"""Build the GNN and the sampler of a run from its options."""

from typing import Any

from gcnzc.graph.dataset import Dataset
from gcnzc.models import gnn
from gcnzc.models.stack import Model
from gcnzc.sampling.neighbor import Sampler, SamplerProtocol
from gcnzc.train.model_options import ModelOptions
from gcnzc.train.option_groups import LoaderOptions


def build_encoder(
    config: ModelOptions, data: Dataset, num_columns: int, label_columns: int = 0
) -> Model:
    """Build the GNN of a run on the CPU.

    Args:
        config: options of the run.
        data: the graph, whose features the model reads.
        num_columns: columns of the outputs.
        label_columns: columns of labels that follow the features; see `label_inputs`.
    """
    assert data.table is not None, "feature_table has checked"
    sizes = (data.table.num_columns + label_columns, config.hidden, num_columns)
    options: dict[str, Any] = {
        "num_layers": config.layers,
        "dropout": config.dropout,
        "input_dropout": config.input_dropout,
        "norm": config.norm,
        "pre_norm": config.pre_norm,
        "pre_activation": config.pre_activation,
        "residual": config.residual,
        "input_linear": config.input_linear,
        "output_linear": config.output_linear,
        "jumping": config.jumping,
        "init": config.init,
    }
    if config.activation != "default":
        options["activation"] = config.activation
    if config.model in ("gat", "gatv2"):
        attention = gnn.GAT if config.model == "gat" else gnn.GATv2
        return attention(
            *sizes,
            **options,
            heads=config.heads,
            output_heads=config.output_heads or None,
            attention_dropout=config.attention_dropout,
            skip=config.skip,
        )
    if config.model == "sage":
        options["self_loops"] = config.self_loops
    kind = {"sage": gnn.SAGE, "gcn": gnn.GCN, "gin": gnn.GIN}[config.model]
    return kind(*sizes, **options)


def build_sampler(config: LoaderOptions, data: Dataset) -> SamplerProtocol:
    """Build the neighbour sampler that --sampler selects."""
    if config.sampler == "dgl":
        from gcnzc.interop.dgl import DglSampler

        return DglSampler(data.graph, list(config.fanouts), seed=config.seed)
    return Sampler(data.graph, list(config.fanouts), seed=config.seed)
