"""A model for link prediction in heterogeneous graphs: an encoder and a decoder of pairs."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from gcnzc.graph.hetero.graph import EdgeType
from gcnzc.models.hetero import HeteroModel
from gcnzc.models.link import Dot, HadamardMLP
from gcnzc.sampling.hetero import HeteroBlock
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.encoder import build_hetero_encoder


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


def build_hetero_link_model(config: TrainConfig, data: HeteroDataset) -> HeteroLinkModel:
    """Build the model of a run of link prediction on the CPU."""
    assert data.edge_type is not None, "`load_hetero` has found it"
    ends = list(dict.fromkeys(data.edge_type[::2]))
    encoder = build_hetero_encoder(config, data, config.model.hidden, ends)
    decoder: nn.Module = Dot()
    if config.graph.task["decoder"] == "mlp":
        decoder = HadamardMLP(config.model.hidden, dropout=config.model.dropout)
    return HeteroLinkModel(encoder, decoder, data.edge_type)
