"""Initialize message-passing layers as the layers of PyG or of DGL do.

The layers of `gcnzc.models.layers` reset their parameters as PyG's do. Their distributions in DGL,
with the gain g = sqrt(2) of ReLU:

- `SAGEConv`: both weights Xavier uniform with gain g, the bias as in `torch.nn.Linear`;
- `GraphConv`: as in PyG: the weight Xavier uniform, the bias 0;
- `GATConv`, `GATv2Conv`: all weights, attention vectors and the projection of the skip connection
  Xavier normal with gain g, all biases 0;
- `GINConv`: it has no weights of its own, and the two linear layers of its MLP are as in torch.

Linear projections of residual connections, of the features and of the outputs are
`torch.nn.Linear`, and are initialized as such with both libraries.
"""

import math
from collections.abc import Iterable

from torch import Tensor, nn

from gcnzc.models.layers import GATLayer, GATv2Layer, SAGELayer

INITS = ("pyg", "dgl")


def initialize(layers: Iterable[nn.Module], init: str) -> None:
    """Initialize layers in place, with random numbers from torch's default generator.

    Args:
        layers: layers whose parameters were reset.
        init: "pyg" keeps the parameters; "dgl" draws those whose distribution differs in DGL.
    """
    if init == "pyg":
        return
    gain = nn.init.calculate_gain("relu")
    for layer in layers:
        if isinstance(layer, SAGELayer):
            nn.init.xavier_uniform_(layer.neighbours.weight, gain)
            nn.init.xavier_uniform_(layer.own.weight, gain)
        elif isinstance(layer, GATLayer):
            nn.init.xavier_normal_(layer.weight.view(-1, layer.in_features), gain)
            _attention_normal_(layer.source_attention, gain)
            _attention_normal_(layer.target_attention, gain)
            _reset_skip(layer.skip, gain)
        elif isinstance(layer, GATv2Layer):
            for linear in (layer.source, layer.target):
                nn.init.xavier_normal_(linear.weight, gain)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            _attention_normal_(layer.attention, gain)
            _reset_skip(layer.skip, gain)


def _attention_normal_(attention_HF: Tensor, gain: float) -> None:
    # DGL's attention vectors have the shape (1, H, F), whose fans are F and H * F
    heads, columns = attention_HF.shape
    nn.init.normal_(attention_HF, std=gain * math.sqrt(2 / (columns + heads * columns)))


def _reset_skip(skip: nn.Linear | None, gain: float) -> None:
    if skip is not None:
        nn.init.xavier_normal_(skip.weight, gain)
        nn.init.zeros_(skip.bias)
