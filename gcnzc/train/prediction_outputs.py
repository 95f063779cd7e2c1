"""Predictions of a model, computed from its outputs.

Notation: M nodes or pairs, C outputs of the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.numbering import KnownNodes
from gcnzc.train.schema import Schema

Array = NDArray[Any]
# outputs are checked in chunks of rows: they may be mapped from a file larger than the memory
CHECKED_ROWS = 1 << 16


@dataclass(frozen=True)
class NodePredictions:
    """Predictions for nodes.

    Attributes:
        nodes: (M,) ids of the nodes: those of the graph's source if they were mapped, such as the
            primary keys of a table, int64 or str; otherwise the int64 node indices (0 to N - 1).
        classes: (M,) predicted classes, int64, or str if the classes have names; for multi-label
            models, (M, C) int64 zeros and ones.
        probabilities: (M, C) float32 class probabilities; for multi-label models, the probability
            of label 1.
        columns: C names of the columns of `probabilities`.
        epoch: the model's, from 1.
    """

    nodes: Array
    classes: Array
    probabilities: Array
    columns: list[str]
    epoch: int


@dataclass(frozen=True)
class LinkPredictions:
    """Predictions for pairs of nodes.

    Attributes:
        sources: (M,) ids, as `NodePredictions.nodes`.
        targets: (M,) ids.
        scores: (M,) float32 logits: a larger score means that an edge is more likely.
        epoch: the model's, from 1.
    """

    sources: Array
    targets: Array
    scores: Array
    epoch: int


def build_predictions(logits: Tensor, ids: Array, schema: Schema, epoch: int) -> NodePredictions:
    """Return the classes and probabilities of nodes.

    Args:
        logits: (M, C), on the host.
        ids: (M,) ids of the nodes.
        schema: of the run.
        epoch: the model's, from 1.

    Raises:
        ValueError: a logit is NaN or infinite.
    """
    check_finite(logits)
    if schema.is_multi_label:
        probabilities = logits.sigmoid()
        classes: Array = (logits > 0).long().numpy()
    else:
        probabilities = logits.softmax(dim=1)
        classes = logits.argmax(dim=1).numpy()
        if schema.classes is not None:
            classes = np.array(schema.classes, dtype=str)[classes]
    columns = list(map(str, schema.classes or range(schema.num_outputs)))
    return NodePredictions(ids, classes, probabilities.numpy(), columns, epoch)


def check_finite(outputs: Tensor) -> None:
    """Raise a ValueError if an output is NaN or infinite."""
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    chunks = columns.split(CHECKED_ROWS)
    wrong = sum(int((~torch.isfinite(chunk)).flatten(1).any(dim=1).sum()) for chunk in chunks)
    if wrong:
        raise ValueError(
            f"{wrong:,} of {len(outputs):,} predictions are NaN or infinite\n\n"
            "hint: check the features; `gcnzc info DATA --verify` reads all of them"
        )


def check_task(task: str, *, has_pairs: bool) -> None:
    """Raise a ValueError if a run of a task does not predict what is asked."""
    if task == "link" and not has_pairs:
        raise ValueError(
            "this is a link-prediction run, and predicts scores of pairs\n\n"
            "hint: --pairs FILE names the pairs (in Python predict_links); `gcnzc predict RUN "
            "--embeddings --out FILE.npy` writes the embeddings of nodes"
        )
    if task != "link" and has_pairs:
        raise ValueError(
            "this is a node-classification run, and predicts classes of nodes\n\n"
            "hint: omit --pairs (in Python use predict), or train with --task link"
        )


def check_pairs(sources: Array, targets: Array) -> None:
    """Raise a ValueError unless there are as many sources as targets."""
    if len(sources) != len(targets):
        raise ValueError(
            f"pairs have {len(sources):,} sources and {len(targets):,} targets\n\n"
            "hint: pairs are (2, M) ids"
        )


def node_indices(known: KnownNodes, nodes: Any, folder: Path) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of nodes, given their ids.

    Args:
        known: the nodes of the graph.
        nodes: (M,) ids: a tensor, an array or a list of integers or strings.
        folder: of the graph.

    Raises:
        ValueError: the ids have another shape or type, or an id is unknown.
    """
    ids = nodes.cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iuUO"):
        raise ValueError(
            f"the ids are of shape {ids.shape} and type {ids.dtype}\n\n"
            "hint: ids are a 1-D array of integers or strings"
        )
    texts = np.array([str(each) for each in ids.tolist()], object)
    indices = known.numbers_of(texts)
    wrong = np.flatnonzero(indices < 0)
    if len(wrong):
        raise ValueError(
            f"{folder} has no node {texts[wrong[0]]!r} (at position {wrong[0]}); it "
            f"has {known.count or 0:,} nodes\n\n"
            "hint: ids are those of the graph's source, see mapping/nodes.csv in its folder, or in "
            "nodes/0 and the like for several node types; without that file they are the numbers "
            "from 0"
        )
    return indices
