"""Options of `gcnzc train` for heterogeneous graphs, and those that do not apply to them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from gcnzc.train.options import Options, at_least, option_name

# the values of --model that are for graphs with several types of nodes and edges
HETERO_MODELS = ("rgcn", "hetero-sage")


@dataclass(frozen=True, kw_only=True)
class HeteroOptions(Options):
    """Training on graphs with several types of nodes and edges."""

    target: str = ""
    """heterogeneous graphs, node classification: type of the nodes to classify; by default the only
    type with labels"""
    temporal: Literal["none", "uniform", "last"] = "none"
    """heterogeneous graphs: sample only neighbours that are not later than the seed: random ones
    (uniform), or the latest (last)"""

    embedding_dim: int = 64
    """heterogeneous graphs: columns of the trainable embeddings of node types without features;
    they are in host memory, and --average does not apply to them"""
    embedding_optimizer: Literal["adagrad", "adam"] = "adagrad"
    """heterogeneous graphs: updates the embeddings of the nodes of a step: Adagrad, or lazy Adam"""
    embedding_lr: float = 0.01
    """heterogeneous graphs: learning rate of the embeddings, which is constant"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "embedding_dim", self.embedding_dim)
        at_least(0, "embedding_lr", self.embedding_lr)


# options that do not apply to heterogeneous graphs: the values that a run accepts, and the reason
# for which it rejects others
REJECTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "sampler": (("gcnzc",), "DGL's sampler is for graphs of one node type"),
    "seed_order": (("shuffled", "rotating"), "graphs of one node type can be partitioned"),
    "features": (("host",), "features of several node types are gathered in host memory"),
    "label_inputs": ((0.0,), "label inputs are for graphs of one node type"),
    "evaluate": (("needed", "sampled"), "outputs are computed in minibatches of evaluated nodes"),
    "pre_norm": ((False,), "the model normalizes the outputs of hidden layers"),
    "pre_activation": ((False,), "the model applies the activation to the outputs of layers"),
    "input_linear": ((False,), "the features of each node type are always projected"),
    "jumping": (("none",), "the model has no jumping knowledge"),
    "init": (("pyg",), "the layers are initialized as PyG's"),
}


def check_hetero(config: Any) -> None:
    """Raise a ValueError if an option of a `TrainConfig` does not apply to heterogeneous graphs."""
    given = f"--model {config.model}"
    if config.batch_size == "all":
        raise ValueError(
            f"--batch-size all with {given}: heterogeneous graphs are trained in minibatches\n\n"
            "hint: give --batch-size a number, such as 1024"
        )
    for field in fields(config):
        if field.name not in REJECTED:
            continue
        accepted, reason = REJECTED[field.name]
        value = getattr(config, field.name)
        if value not in accepted:
            option = option_name(field.name)
            shown = option if isinstance(value, bool) else f"{option} {value}"
            remedy = f"omit {option}"
            if len(accepted) > 1:
                remedy = f"use {option} {' or '.join(map(str, accepted))}"
            raise ValueError(f"{shown} with {given}: {reason}\n\nhint: {remedy}")
