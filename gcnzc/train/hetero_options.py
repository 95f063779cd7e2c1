"""Options of `gcnzc train` for heterogeneous graphs, and those that do not apply to them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from gcnzc.train.options import Options, check_least, option_name

# the values of --model that are for graphs with several types of nodes and edges
HETERO_MODELS = ("rgcn", "rgat", "hgt", "hetero-sage")

# accepted also for destination types of fewer nodes, which it then repeats
DEFAULT_EVALUATE_NEGATIVES = 100


@dataclass(frozen=True, kw_only=True)
class HeteroOptions(Options):
    """Training on graphs with several types of nodes and edges."""

    target: str = ""
    """heterogeneous graphs, node classification: type of the nodes to classify; by default the only
    type with labels"""
    edge_type: str = ""
    """heterogeneous graphs, link prediction: type of the edges to predict, such as
    user,buys,item, or the name of its relation; by default the only edge type"""
    edge_split: Literal["auto", "time", "random"] = "auto"
    """heterogeneous graphs, link prediction: edges that are held out for validation and test: the
    latest, of which the test edges are the last (time), or random ones; auto: time if the edges or
    their nodes have times"""
    reverse_types: str = "auto"
    """heterogeneous graphs, link prediction: edge types with the reverse edges of --edge-type, such
    as item,bought_by,user, or names of relations, separated by commas; they are held out together.
    none: no edge type; auto: those that are found by their edges and names"""
    valid_edges: float = 0.1
    """heterogeneous graphs, link prediction: fraction of the edges that is held out for
    validation"""
    test_edges: float = 0.1
    """heterogeneous graphs, link prediction: fraction of the edges that is held out for test"""
    evaluate_negatives: int | Literal["all"] = DEFAULT_EVALUATE_NEGATIVES
    """heterogeneous graphs, link prediction: random destinations with which each held-out edge is
    ranked in an evaluation; all: all nodes of their type to which its source has no training edge
    (for test: no training or validation edge), which gives recall@K and hit_rate@K instead of
    auc; more than 100 must be below the number of destinations"""
    temporal: Literal["none", "uniform", "last"] = "none"
    """heterogeneous graphs: sample only neighbours that are not later than the seed node, or
    earlier than the seed edge: random ones (uniform), or the latest (last); the nodes to classify,
    or the edges to predict or their nodes, must have times"""
    times: Literal["both", "edge", "node"] = "both"
    """heterogeneous graphs, with --temporal: times that count: those of edges (edge), those of
    nodes (node: an edge is as late as its source), or the later of these (both). Nodes to classify
    are seeds at their own time in any case"""

    embedding_dim: int = 64
    """heterogeneous graphs: columns of the trainable embeddings of node types without features;
    they are in host memory, and --average does not apply to them"""
    embedding_optimizer: Literal["adagrad", "adam"] = "adagrad"
    """heterogeneous graphs: updates the embeddings of the nodes of a step: Adagrad, or lazy Adam"""
    embedding_lr: float = 0.01
    """heterogeneous graphs: learning rate of the embeddings, which is constant"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(
            self, embedding_dim=1, evaluate_negatives=1, valid_edges=0, test_edges=0, embedding_lr=0
        )
        if not self.valid_edges + self.test_edges < 1:
            raise ValueError(
                f"--valid-edges {self.valid_edges:g} and --test-edges {self.test_edges:g} leave no "
                "edges to train on\n\nhint: their sum is below 1"
            )


# options that do not apply to heterogeneous graphs: the values that a run accepts, and the reason
# for which it rejects others
REJECTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "sampler": (("gcnzc",), "DGL's sampler is for graphs of one node type"),
    "seed_order": (("shuffled", "rotating"), "graphs of one node type can be partitioned"),
    "negatives": (("uniform",), "negative pairs have the source of their edge"),
    "features": (("host",), "features of several node types remain in host memory"),
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
    if config.edge_split == "random" and config.temporal != "none":
        raise ValueError(
            f"--edge-split random with --temporal {config.temporal}: held-out edges would be in "
            "the neighbourhoods of later training edges\n\nhint: use --edge-split time"
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
