"""Predict classes of nodes and scores of pairs of nodes, and compute embeddings of nodes.

The best model of a run computes them. Notation: N nodes of the graph, or of one type in a
heterogeneous graph; M nodes or pairs; C outputs of the model; D output columns of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.datasets.source import SPLITS
from gcnzc.graph.graph import Graph
from gcnzc.graph.times import as_times, describe_wrong_time, parse_times
from gcnzc.models.hetero import HeteroModel
from gcnzc.sampling.link import LinkSampler
from gcnzc.train.build import build_hetero_sampler, choose_fanouts
from gcnzc.train.config import check_fanouts
from gcnzc.train.hetero.inference import SAMPLED_SEEDS, WHOLE_SEEDS, pair_outputs
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.prediction_files import find_nodes, read_nodes, read_pairs, read_times
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.trained import Array, Trained, open_trained

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


@dataclass(frozen=True)
class NodeEmbeddings:
    """Outputs of a layer for all nodes.

    Attributes:
        nodes: (N,) ids of the nodes, see `NodePredictions`.
        rows: (N, D) float32; read-only if a scratch folder was given.
        layer: number of the layer, from 1; None for the output of the whole model.
        epoch: the model's, from 1.
        node_type: of the nodes of a heterogeneous graph; otherwise None.
    """

    nodes: Array
    rows: Array
    layer: int | None
    epoch: int
    node_type: str | None = None


def predict(
    run: str | Path | Trained,
    data: str | Path | None = None,
    *,
    nodes: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> NodePredictions:
    """Predict the classes of nodes with the best model of a run.

    All neighbours are read unless `fanouts` is given. In a heterogeneous graph, the nodes are those
    of the type that the model classifies, and a temporal run reads neighbours that are not later
    than the node.

    Args:
        run: the run folder; or for several calls what `gcnzc.train.trained.open_trained` returns,
            with its own graph and device.
        data: a graph with the same features, which may have other nodes and no labels; None for
            that of the run.
        nodes: ids of nodes, in any order, as the graph's source has them; a `Path` of a file of
            ids, see `gcnzc.train.prediction_files.read_nodes`; or "train", "valid" or "test"; None
            or "all" for all nodes.
        fanouts: heterogeneous graphs: neighbours sampled per node and edge type, one number per
            layer, input layer first. None for all neighbours.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The classes and probabilities of the M nodes, in the order of `nodes`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        TypeError: `memory` is not an integer.
        ValueError: one of

            - the graph does not fit the model;
            - a node or a split is unknown, or a split has no nodes;
            - the run is of link prediction;
            - the run is temporal, and the nodes have no times;
            - an output is not finite;
            - `memory` is below 2**20 or given without `scratch`, or the scratch folder has rows of
              another computation;
            - `scratch` or `memory` is given for a heterogeneous graph, or `fanouts` for another
              graph;
            - `fanouts` is invalid, or does not have one number per layer.

        OSError: the disk of the scratch folder is full.
    """
    trained = _open_run(run, data, device)
    if trained.is_link:
        raise ValueError(
            "this is a link-prediction run, and predicts scores of pairs\n\n"
            "hint: --pairs FILE names the pairs (in Python predict_links); `gcnzc predict RUN "
            "--embeddings --out FILE.npy` writes the embeddings of nodes"
        )
    how: dict[str, Any] = {"fanouts": fanouts, "scratch": scratch, "memory": memory}
    _check_options(trained, **how)
    target = trained.data.target if trained.is_hetero else ""
    indices: Array | None = None
    if isinstance(nodes, Path):
        indices = read_nodes(nodes, trained.known_nodes(target))
    elif isinstance(nodes, str):
        indices = None if nodes == "all" else _split_indices(trained, nodes)
    elif nodes is not None:
        indices = find_nodes(trained.known_nodes(target), nodes, "nodes")
    logits = trained.outputs(reporter, "predict", nodes=indices, node_type=target, **how)
    _check_finite(logits)
    schema, ids = trained.schema, trained.node_ids(indices, target)
    if schema.is_multi_label:
        probabilities = logits.sigmoid()
        classes: Array = (logits > 0).long().numpy()
    else:
        probabilities = logits.softmax(dim=1)
        classes = logits.argmax(dim=1).numpy()
        if schema.classes is not None:
            classes = np.array(schema.classes, dtype=str)[classes]
    columns = list(map(str, schema.classes or range(schema.num_outputs)))
    return NodePredictions(ids, classes, probabilities.numpy(), columns, trained.epoch)


def predict_links(
    run: str | Path | Trained,
    data: str | Path | None = None,
    *,
    pairs: Any,
    times: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> LinkPredictions:
    """Predict the scores of pairs of nodes with the best model of a link prediction run.

    All neighbours are read unless `fanouts` is given. In a heterogeneous graph, the pairs are of
    the edge type that the model predicts. Held-out edges of the run are not in the neighbourhoods,
    unless `data` is given, or the run is temporal by the times of the edges.

    Args:
        run, data: see `predict`.
        pairs: (2, M) ids of the sources and the targets, as the graph's source has them; or a
            `Path` of a file of pairs, see `gcnzc.train.prediction_files.read_pairs`.
        times: of the pairs, for temporal runs: (M,) integers in the unit of the graph's times, or
            one for all; or dates, if `graph.time_unit` is set. Neighbours are earlier. None for
            those of the file, or for a time after all nodes and edges.
        fanouts: see `predict`.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The scores of the M pairs, in the order of `pairs`.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph or no file of embeddings.
        TypeError: `memory` is not an integer.
        ValueError: one of

            - the graph does not fit the model;
            - `pairs` are not (2, M), or a node is unknown;
            - the run is not of link prediction;
            - `times` are given, and the run is not temporal, or they are not M times;
            - an output is not finite;
            - `memory` is below 2**20 or given without `scratch`, or the scratch folder has rows of
              another computation;
            - `scratch` or `memory` is given for a heterogeneous graph, or `times` or `fanouts` for
              another graph;
            - `fanouts` is invalid, or does not have one number per layer.

        OSError: the disk of the scratch folder is full.
    """
    trained = _open_run(run, data, device)
    if not trained.is_link:
        raise ValueError(
            "this is a node-classification run, and predicts classes of nodes\n\n"
            "hint: omit --pairs (in Python use predict), or train with --task link"
        )
    how: dict[str, Any] = {"fanouts": fanouts, "scratch": scratch, "memory": memory}
    _check_options(trained, times=times, **how)
    source_type, target_type = trained.data.edge_type[::2] if trained.is_hetero else ("", "")
    known = [trained.known_nodes(source_type)] * 2
    if source_type != target_type:
        known[1] = trained.known_nodes(target_type)
    if isinstance(pairs, Path):
        sources, targets = read_pairs(pairs, known)
        if times is None and trained.config.graph.is_temporal:
            times = read_times(pairs, trained.data.graph.time_unit)
    elif len(pairs) != 2 or len(pairs[0]) != len(pairs[1]):
        raise ValueError(
            f"pairs have the lengths {', '.join(str(len(ids)) for ids in pairs)}\n\n"
            "hint: pairs are (2, M) ids: sources, targets"
        )
    else:
        sources = find_nodes(known[0], pairs[0], "pairs")
        targets = find_nodes(known[1], pairs[1], "pairs")
    if trained.is_hetero:
        scores = _score_typed_pairs(trained, sources, targets, reporter, times, fanouts)
    else:
        nodes, places = np.unique(np.concatenate([sources, targets]), return_inverse=True)
        rows = trained.outputs(reporter, "predict", nodes=nodes, **how)
        ends = torch.from_numpy(places.reshape(2, -1))
        scores = trained.model.scores(rows, ends[0], ends[1])
    _check_finite(scores)
    source_ids = trained.node_ids(sources, source_type)
    target_ids = trained.node_ids(targets, target_type)
    return LinkPredictions(source_ids, target_ids, scores.numpy(), trained.epoch)


def embed_nodes(
    run: str | Path | Trained,
    data: str | Path | None = None,
    *,
    node_type: str | None = None,
    layer: int | None = None,
    time: Any = None,
    fanouts: Sequence[int] | None = None,
    device: str = "auto",
    scratch: str | Path | None = None,
    memory: int | None = None,
    reporter: Reporter | None = None,
) -> NodeEmbeddings:
    """Compute the output of a layer for all nodes with the best model of a run.

    Args:
        run, data: see `predict`.
        node_type: heterogeneous graphs: type of the nodes. None for the type that the model
            classifies, or that both ends of the predicted edges have.
        layer: number of the layer, from 1; its output is taken as the next layer receives it.
            None for the last hidden layer, or in link prediction for the rows from which the scores
            are computed.
        time: temporal runs on heterogeneous graphs: time of all nodes, an integer in the unit of
            the graph's times; or a date, if `graph.time_unit` is set. Neighbours are not later; in
            link prediction they are earlier. Default: the times of the nodes; in link prediction,
            or if nodes have no times, later than all nodes and edges.
        fanouts: heterogeneous graphs: see `predict`.
        device: `auto`, `cpu` or `cuda`.
        scratch, memory: see `gcnzc.inference`; not for heterogeneous graphs.
        reporter: shows the progress; None shows nothing.

    Returns:
        The ids of all N nodes, and their rows, (N, D) float32.

    Raises:
        FileNotFoundError: the folder has no run, or there is no graph.
        TypeError: `layer` or `memory` is not an integer.
        ValueError: the graph does not fit the model, there is no such layer or node type, an output
            is not finite, `memory` is below 2**20 or given without `scratch`, or the scratch folder
            has rows of another computation.
        OSError: the disk of the scratch folder is full.
    """
    trained = _open_run(run, data, device)
    how: dict[str, Any] = {"fanouts": fanouts, "scratch": scratch, "memory": memory}
    _check_options(trained, node_type=node_type, time=time, **how)
    encoder, own_type = trained.encoder, ""
    has_linear = not trained.is_hetero and encoder.output_linear is not None
    if trained.is_hetero:
        own_type, has_linear = _choose_type(trained, node_type), bool(encoder.output_linears)
    is_whole = trained.is_link and (not trained.is_hetero or own_type in encoder.targets)
    if layer is None and not is_whole:
        # the last layer computes the outputs, unless a linear layer follows it
        layer = len(encoder.layers) - (not has_linear)
        if layer == 0:
            raise ValueError(
                "the model has no hidden layer: its only layer computes the outputs\n\n"
                "hint: --layer 1 (in Python layer=1) returns the outputs"
            )
    if trained.is_hetero:
        if layer is not None:
            _check_layer(encoder, layer, own_type)
        how["times"] = _times(trained, own_type, time)
    rows = trained.outputs(reporter, "embed", node_type=own_type, layer=layer, **how)
    _check_finite(rows)
    ids = trained.node_ids(node_type=own_type)
    return NodeEmbeddings(ids, rows.numpy(), layer, trained.epoch, own_type or None)


def _open_run(run: str | Path | Trained, data: str | Path | None, device: str) -> Trained:
    return run if isinstance(run, Trained) else open_trained(Path(run), data, device)


def _score_typed_pairs(
    trained: Trained,
    sources: Array,
    targets: Array,
    reporter: Reporter | None,
    times: Any,
    fanouts: Sequence[int] | None,
) -> Tensor:
    """Return the (M,) scores of pairs in a heterogeneous graph, from their own neighbourhoods."""
    if not len(sources):
        return torch.empty(0)
    config, graph = trained.config, trained.graph
    if config.graph.is_temporal and times is None:
        times = time_after_all(graph)
    if times is not None and np.ndim(times) == 0:
        times = np.full(len(sources), _convert_time(graph, times))
    sampler = LinkSampler(
        build_hetero_sampler(config, graph, choose_fanouts(fanouts, config.layers)),
        np.stack([sources, targets]),
        trained.data.edge_type,
        times=times,
        num_negatives=0,
        strict=False,
        exclude="none",
        seed=config.loading.seed,
    )

    batch_size = WHOLE_SEEDS if fanouts is None else SAMPLED_SEEDS
    bars = reporter or NullReporter()
    with trained.open_features() as table, bars.task("predict") as bar:
        of = Evaluated(trained.model, table, trained.device, bar)
        return pair_outputs(of, config, sampler, batch_size, trained.embeddings)[:, 0]


def _choose_type(trained: Trained, node_type: str | None) -> str:
    """Return the type of the nodes that are embedded."""
    targets, node_types = trained.encoder.targets, trained.data.graph.node_types
    if node_type is None and len(targets) > 1:
        raise ValueError(
            f"the model has embeddings of the node types {', '.join(targets)}\n\n"
            f"hint: --node-type {' or '.join(targets)} (in Python `node_type`)"
        )
    chosen: str = targets[0] if node_type is None else node_type
    if chosen not in node_types:
        raise ValueError(
            f"there is no node type {node_type!r:.100}\n\n"
            f"hint: the node types are {', '.join(node_types)}"
        )
    return chosen


def _check_layer(encoder: HeteroModel, layer: int, node_type: str) -> None:
    """Check that a layer exists, and computes a node type."""
    num_layers = len(encoder.layers)
    layers = [n for n in range(1, num_layers + 1) if node_type in encoder.layer_types(n)]
    if layer not in layers:
        raise ValueError(
            f"layer {layer} of a model of {num_layers} layers does not compute nodes of type "
            f"{node_type!r}\n\nhint: layers that do: {', '.join(map(str, layers)) or 'none'}"
        )


def _times(trained: Trained, node_type: str, time: Any) -> Tensor | None:
    """Return the time of each node, up to which its neighbours are read; None for their own."""
    graph, is_link = trained.graph, trained.is_link
    if not trained.config.graph.is_temporal:
        return None
    if time is None:
        if not is_link and graph.nodes(node_type).time is not None:
            return None
        time = time_after_all(graph)
    else:
        time = _convert_time(graph, time)
    # neighbours of pairs are earlier than the pair, as in training
    return torch.full((graph.nodes(node_type).num_nodes,), time - 1 if is_link else time)


def time_after_all(graph: Graph) -> int:
    """Return a time that is later than all nodes and edges of a graph; 0 without times."""
    times = [graph.nodes(name).time for name in graph.node_types]
    times += [graph.edges(each).time for each in graph.edge_types]
    return 1 + max((int(own.max()) for own in times if own is not None and len(own)), default=-1)


def _convert_time(graph: Graph, time: Any) -> int:
    """Return a time as an integer in the unit of the graph's times.

    Args:
        graph: the graph.
        time: an integer or a date; or a string of one, see `parse_times`.

    Raises:
        ValueError: the string is not a time or could be two times, or there is no unit.
    """
    if not isinstance(time, str):
        return int(as_times("time", [time], 1, graph.time_unit, is_limit=True))
    times, wrong = parse_times([time], graph.time_unit)
    if wrong is not None:
        raise describe_wrong_time(f"--time {time}", time, graph.time_unit)
    return int(times[0])


def _check_options(
    trained: Trained,
    *,
    fanouts: Sequence[int] | None = None,
    scratch: str | Path | None = None,
    memory: int | None = None,
    **typed: Any,
) -> None:
    """Check the options of a computation; None means that an option is not given.

    Args:
        trained: the model and the graph.
        fanouts, scratch, memory: see `predict`.
        typed: the other options of heterogeneous graphs: `node_type`, `time`, `times`.

    Raises:
        ValueError: an option does not fit the graph, the model or the run.
    """
    given = [name for name, value in {"fanouts": fanouts, **typed}.items() if value is not None]
    if not trained.is_hetero:
        if given:
            # the command line has `--time`, one value for all pairs
            option = "--" + {"times": "time"}.get(given[0], given[0]).replace("_", "-")
            raise ValueError(
                f"{option} (in Python `{given[0]}`) is given, and the model of the run is for "
                f"graphs of one node type\n\nhint: omit {option}, which is for heterogeneous "
                "graphs"
            )
        return
    if scratch is not None or memory is not None:
        raise ValueError(
            "--scratch or --memory is given, but layer outputs of heterogeneous graphs are not "
            "stored\n\n"
            "hint: omit --scratch and --memory (in Python `scratch` and `memory`)"
        )
    if {"time", "times"} & {*given} and not trained.config.graph.is_temporal:
        raise ValueError(
            "a time is given, but the run has --temporal none, and reads neighbours of any time"
            "\n\nhint: omit --time (in Python `time` or `times`)"
        )
    if fanouts is None:
        return
    check_fanouts(fanouts, "--fanouts")
    if len(fanouts) != trained.config.layers:
        raise ValueError(
            f"{len(fanouts)} fanouts ({','.join(map(str, fanouts))}) for {trained.config.layers} "
            "layers\n\nhint: give one number per layer, input layer first"
        )


def _check_finite(outputs: Tensor) -> None:
    """Raise a ValueError if an output is NaN or infinite."""
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    chunks = columns.split(CHECKED_ROWS)
    wrong = sum(int((~torch.isfinite(chunk)).flatten(1).any(dim=1).sum()) for chunk in chunks)
    if wrong:
        raise ValueError(
            f"{wrong:,} of {len(outputs):,} predictions are NaN or infinite\n\n"
            "hint: check the features; `gcnzc info DATA --verify` reads all of them"
        )


def _split_indices(trained: Trained, split: str) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of a split.

    Raises:
        ValueError: there is no such split, or it has no nodes.
    """
    data = trained.data
    if split not in SPLITS or not len(data.split.get(split, ())):
        raise ValueError(
            f"{data.name} has no {split} nodes\n\n"
            "hint: the splits are train, valid and test, as far as the graph has them; without "
            "nodes, all are predicted"
        )
    indices: Array = data.split[split].numpy()
    return indices
