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

    def __post_init__(self) -> None:
        super().__post_init__()


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


__all__ = ["HETERO_MODELS", "HeteroOptions", "at_least", "check_hetero"]
