"""Build the model of a run from its options."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from gcnzc.graph.dataset import Dataset
from gcnzc.graph.stores import EdgeType
from gcnzc.models.hetero import HeteroModel
from gcnzc.models.link import Dot, HadamardMLP, LinkModel
from gcnzc.sampling.hetero import HeteroBlock
from gcnzc.train.config import ModelOptions, TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.schema import Schema


class HeteroLinkModel(nn.Module):
    """Computes the logits of pairs of nodes of one edge type.

    Args:
        encoder: computes embeddings of the node types of both ends, as a dict.
        decoder: computes scores from the embeddings of the sources and of the destinations.
        edge_type: of the pairs.
    """

    def __init__(self, encoder: HeteroModel, decoder: nn.Module, edge_type: EdgeType) -> None:
        super().__init__()
        self.encoder, self.decoder, self.edge_type = encoder, decoder, edge_type

    def forward(
        self, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor], pairs: Tensor
    ) -> Tensor:
        """Return the (P,) logits of pairs.

        Args:
            blocks: one per layer, input layer first.
            x: features of the sources of the first block by node type.
            pairs: (2, P) positions among the seeds of the source type and of the destination type.
        """
        rows = self.encoder(blocks, x)
        # the gradient of `embedding` is deterministic, also on a GPU
        source = functional.embedding(pairs[0], rows[self.edge_type[0]])
        target = functional.embedding(pairs[1], rows[self.edge_type[2]])
        logits: Tensor = self.decoder(source, target)
        return logits


def build_model(config: TrainConfig, data: Dataset | HeteroDataset, schema: Schema) -> nn.Module:
    """Build the model of a run on the CPU, with initial weights from torch's generator.

    Args:
        config: options of the run.
        data: the graph, whose features the model reads; it may have no labels.
        schema: the outputs of the model.
    """
    options, task = config.model, config.graph.task
    is_link = task.name == "link"
    num_outputs = options.hidden if is_link else schema.num_outputs
    encoder: Any
    inputs: tuple[Any, ...]
    if isinstance(data, HeteroDataset):
        # types without features have trainable embeddings
        widths = dict.fromkeys(data.graph.node_types, options.embeddings["dim"])
        widths |= {name: table.num_columns for name, table in data.table.tables.items()}
        target = list(dict.fromkeys((data.edge_type or ())[::2])) if is_link else data.target
        inputs = data.graph.metadata(), widths
        encoder = build_gnn(options, inputs, (num_outputs, target), config.layers)
    else:
        assert data.table is not None, "feature_table has checked"
        label_columns = schema.num_outputs if config.graph.label_inputs else 0
        inputs = (data.table.num_columns + label_columns,)
        encoder = build_gnn(options, inputs, (num_outputs,), config.layers)
    if not is_link:
        return encoder
    decoder: nn.Module = Dot()
    if task["decoder"] == "mlp":
        decoder = HadamardMLP(options.hidden, dropout=options.dropout)
    if isinstance(data, HeteroDataset):
        assert data.edge_type is not None, "`load_hetero` has found it"
        return HeteroLinkModel(encoder, decoder, data.edge_type)
    return LinkModel(encoder, decoder)


def build_gnn(
    options: ModelOptions, inputs: Sequence[Any], outputs: Sequence[Any], layers: int
) -> nn.Module:
    """Build the GNN that --model selects.

    Args:
        options: options of the model.
        inputs: columns of the features; or of a heterogeneous graph, the metadata and the columns
            by node type, see `gcnzc.models.RGCN`.
        outputs: columns of the outputs, and of a heterogeneous graph the target.
        layers: number of layers.
    """
    model: nn.Module = options.model.load()(
        *inputs,
        options.hidden,
        *outputs,
        num_layers=layers,
        dropout=options.dropout,
        **options.model.given,
    )
    return model
