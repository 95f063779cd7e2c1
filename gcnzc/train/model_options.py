"""Options of `gcnzc train` that describe the model; see `gcnzc.train.option_groups`."""

from dataclasses import dataclass
from typing import Literal

from gcnzc.train.options import Options, check_least, check_range


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model: its layers, sizes and dropout rates."""

    model: Literal["sage", "gcn", "gin", "gat", "gatv2", "rgcn", "rgat", "hgt", "hetero-sage"] = (
        "sage"
    )
    """GraphSAGE with mean aggregation, GCN, GIN, GAT, or GATv2; for heterogeneous graphs R-GCN,
    R-GAT, HGT, or GraphSAGE with a layer for each edge type"""
    hidden: int = 256
    """hidden features; for GAT and GATv2, per attention head; for R-GAT and HGT, of all heads"""
    layers: int = 3
    """layers of the model, as many as fanouts"""
    heads: int = 4
    """GAT, GATv2, R-GAT and HGT: attention heads"""
    output_heads: int = 0
    """GAT and GATv2: attention heads of the last layer; 0: as many as --heads; not with
    --output-linear"""
    self_loops: bool = False
    """SAGE: include a node in the mean of its in-neighbours, as if the graph had one more
    self loop at every node; the other models always include it"""
    dropout: float = 0.5
    """dropout rate of the hidden features"""
    input_dropout: float = 0.0
    """dropout rate of the input features"""
    attention_dropout: float = 0.0
    """GAT, GATv2 and R-GAT: dropout rate of the attention weights"""
    norm: Literal["none", "batch", "layer"] = "none"
    """normalization after each hidden layer: batch normalization, layer normalization, or none"""
    pre_norm: bool = False
    """normalize the inputs of each layer instead of the outputs of hidden layers"""
    pre_activation: bool = False
    """apply normalization, activation and dropout to the inputs of each layer and of the output
    projection; needs --input-linear and --output-linear"""
    residual: bool = False
    """add a linear projection of each layer's input to its output; with --pre-activation, the input
    itself, as it was before normalization"""
    skip: bool = True
    """GAT and GATv2: omit the linear skip connection that each layer has by default; --residual
    replaces it and the bias"""
    input_linear: bool = False
    """project the features to the hidden size before the first layer"""
    output_linear: bool = False
    """compute the outputs with a linear projection after the last layer, which is then a hidden
    layer"""
    jumping: Literal["none", "sum", "cat"] = "none"
    """input of --output-linear: the output of the last layer (none), or the sum or the
    concatenation of the outputs of all layers (jumping knowledge)"""
    activation: Literal["default", "relu", "elu"] = "default"
    """activation after each hidden layer; default: ELU for GAT and GATv2, otherwise ReLU"""
    init: Literal["pyg", "dgl"] = "pyg"
    """initialization of the message-passing layers: that of PyG's or of DGL's layers"""
    label_inputs: float = 0.0
    """node classification: fraction of the training nodes whose labels are input features in a
    training step; the loss is over the other training nodes. In evaluation, the labels of all
    training nodes are features. 0: no labels are features; 0.5 is common"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, hidden=1, layers=1, heads=1, output_heads=0)
        dropped = "it is the probability that a value is zeroed; 0 turns dropout off"
        for name, hint in (
            ("dropout", dropped),
            ("input_dropout", dropped),
            ("attention_dropout", dropped),
            ("label_inputs", "0.5 is common; the loss is over the other training nodes"),
        ):
            check_range(self, name, lambda value: 0 <= value < 1, "in [0, 1)", hint)
        if self.output_heads and self.output_linear:
            raise ValueError(
                f"--output-heads {self.output_heads} has no effect with --output-linear, which "
                "computes the logits\n\nhint: omit --output-heads"
            )
        if self.pre_norm and self.norm == "none":
            raise ValueError(
                "--pre-norm has no effect with --norm none\n\n"
                "hint: also choose --norm batch or --norm layer"
            )
        if self.pre_norm and self.pre_activation:
            raise ValueError(
                "--pre-activation includes --pre-norm\n\n"
                "hint: pass one of them; --norm chooses the normalization"
            )
        if self.pre_activation and not (self.input_linear and self.output_linear):
            raise ValueError(
                "--pre-activation needs --input-linear and --output-linear: activation comes "
                "before each layer, and would change the features\n\n"
                "hint: add --input-linear and --output-linear"
            )
        if self.jumping != "none" and not self.output_linear:
            raise ValueError(
                f"--jumping {self.jumping} needs --output-linear: the outputs of hidden layers do "
                "not have as many columns as the logits\n\nhint: add --output-linear"
            )
