"""Layer-wise inference: compute the outputs of a model for all nodes, without sampling neighbours.

The nodes are divided into the same ranges for any number of workers, and each range is computed in
the same way, with layer outputs in memory or on disk, so that the results are bit-identical.

Notation: N nodes, M requested nodes.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model, check_columns, parameter_dtype
from gcnzc.sampling.neighbor import check_graph, check_seeds
from gcnzc.system.arguments import IdsLike, check_callable, check_device, check_integer, check_kind
from gcnzc.system.host_memory import available_bytes
from gcnzc.train.layerwise import ranges
from gcnzc.train.layerwise.layer import FullLayer, gather_rows
from gcnzc.train.layerwise.ranges import (
    BATCH_NODES,
    assign_equal_ranges,
    assign_ranges,
    ids_of_range,
    limit_batch_nodes,
    needed_nodes,
    row_index,
)
from gcnzc.train.layerwise.scratch import Scratch, bytes_of, open_scratch
from gcnzc.train.layerwise.store import Rows, Store

Progress: TypeAlias = Callable[[int, int], object]  # called with (done, total)

# the least memory for layer outputs
MIN_MEMORY = 1 << 20

# tensors are read in chunks, which threads checksum in parallel, and of which few are in memory
CHUNK_BYTES = 1 << 24


def inference(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device | str = "cpu",
    *,
    nodes: IdsLike | None = None,
    layer: int | None = None,
    batch_nodes: int = BATCH_NODES,
    progress: Progress | None = None,
    group: Group | None = None,
    scratch: str | Path | None = None,
    memory: int | None = None,
) -> Tensor:
    """Compute the logits of nodes layer by layer, without sampling neighbours.

    The model runs in evaluation mode; its mode is restored afterwards. Host memory holds the
    features, the inputs and the outputs of the current layer, and its projected inputs if they have
    fewer columns than its inputs or the layer is GATv2's. The workers of one machine share this
    memory.

    With `scratch`, these are written to files instead, and read in bounded memory. The outputs
    are bit-identical. If the process is interrupted or killed, or the disk is full, another call
    with the same arguments reuses the finished ranges of nodes and computes the others.

    Args:
        model: a model on `device`.
        graph: the whole graph, with N nodes.
        table: (N, in_features) features, on the host or on `device`.
        device: device of the computation; layer outputs stay on the host.
        nodes: (M,) int32 or int64 node ids, on the host: a tensor, an array or a list. Hidden
            layers are computed only for the nodes that these depend on. Default: all, in order.
        layer: return the output of this layer, from 1, as the next layer receives it; with
            `pre_norm` or `pre_activation`, before the normalization and activation of the next
            layer. Default: the logits.
        batch_nodes: maximum number of nodes that are computed at a time. There are fewer if the
            graph is small, or if their in-edges would exceed 2**20.
        progress: called with (done, total): the output rows that this worker has computed, and
            those that it computes in all layers.
        group: the workers among which the nodes are divided; all pass the same arguments. Default:
            this process only.
        scratch: folder for layer outputs, which is created if needed and locked. The folder is
            kept: in the end it has the outputs of the last layer, from which the result is mapped.
            Delete it when it is not needed for another call any more. Outputs of another model,
            graph or features are not used.
        memory: with `scratch`, bytes for layer outputs in this process at a time, at least 2**20:
            those of the in-neighbours that are aggregated. In addition, memory holds the
            inputs and outputs of one range of `batch_nodes` nodes, and a few bytes for each node of
            the graph. Default: an eighth of the available memory.

    Returns:
        (M, columns) or (N, columns) on the host, the same on all workers. The workers of one
        machine share this memory, and with `scratch` it is mapped read-only: do not write to it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the table does not match the graph or the model, a node is not in the graph, the
            graph has an offset or a source out of range, see `Graph.check`, or the folder has rows
            of another computation, other files, or is in use.
        OSError: the disk is full or may not be written.
        RuntimeError: there is too little memory for the workers of a machine to share.
        WorkerLost: another worker has failed.
    """
    check_kind("model", model, Model, "for others, compute outputs of a Loader with fanouts of -1")
    check_graph(graph)
    graph.check_untyped()
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    check_callable("progress", progress)
    if group is not None:
        check_kind("group", group, Group, "gcnzc.exchange.current_group(), or None")
    if table.num_rows != graph.num_nodes:
        raise ValueError(
            f"the table has {table.num_rows} rows of features for a graph of {graph.num_nodes} "
            "nodes\n\nhint: the table must have one row for each node"
        )
    check_columns(model, table.num_columns)
    graph.check()
    where = check_device("device", device)
    if layer is not None:
        layer = check_integer("layer", layer, 1, len(model.layers))
    batch_nodes = limit_batch_nodes(graph, check_integer("batch_nodes", batch_nodes, 1))
    ids: Tensor | None = None
    positions: Tensor | None = None
    if nodes is not None:
        ids = check_seeds("nodes", nodes, graph.num_nodes)
        # a node that is given twice is computed once
        distinct, inverse = ids.unique(return_inverse=True)
        if len(distinct) < len(ids):
            ids, positions = distinct, inverse
    if scratch is None and memory is not None:
        raise ValueError(
            f"memory is {memory}, but there is no folder for layer outputs that exceed it\n\n"
            "hint: also pass scratch, a folder on a disk"
        )

    def identify() -> dict[str, Any]:
        """Return what layer outputs depend on."""
        return {
            "model": fingerprint_of_model(model),
            "graph": fingerprint(graph.indptr, graph.indices),
            "features": fingerprint_of_table(table),
            "nodes": "all" if ids is None else fingerprint(ids),
            "layer": layer,
            "ranges": f"{batch_nodes} nodes, {ranges.BATCH_EDGES} edges",
            "versions": f"torch {torch.__version__}, {where.type}",
        }

    store = Store(group or Group())
    with ExitStack() as stack:
        if scratch is not None:
            if memory is None:
                memory = max(MIN_MEMORY, available_bytes() // 8)
            memory = check_integer("memory", memory, MIN_MEMORY, hint="bytes, such as 2**30")
            opened = open_scratch(Path(scratch), memory, store.group, identify)
            store = stack.enter_context(opened)
        stack.enter_context(evaluation_mode(model))
        # rows are stored in the dtype of the model
        stack.enter_context(torch.autocast(where.type, enabled=False))
        layers = _Layers(model, graph, table, where, ids, layer, batch_nodes, progress, store)
        rows = layers.outputs()
        return rows if positions is None else rows[positions]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Compute without gradients and in evaluation mode; the model's mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds a number of rows to those that are done, and reports them."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None and count:
            progress(done, total)

    return advance


@dataclass
class _Layers:
    """Computes the layers one after the other.

    Args:
        model, graph, table, device, nodes, layer, batch_nodes, progress: those of `inference`,
            which has checked them.
        store: keeps the rows.
    """

    model: Model
    graph: Graph
    table: FeatureTable
    device: torch.device
    nodes: Tensor | None
    layer: int | None
    batch_nodes: int
    progress: Progress | None
    store: Store

    def __post_init__(self) -> None:
        graph, group = self.graph, self.store.group
        self.num_layers = self.layer or len(self.model.layers)
        self.needed = needed_nodes(graph, self.num_layers, self.nodes, self.batch_nodes)
        self.shares = [
            assign_ranges(graph, targets, self.batch_nodes, group.world_size)
            for targets in self.needed[1:]
        ]
        self.own = [share[group.rank] for share in self.shares]
        self.own_counts = [sum(end - begin for begin, end in spans) for spans in self.own]
        self.advance = counter(self.progress, sum(self.own_counts))
        # whether the outputs of all layers are combined to the logits
        self.is_combined = self.layer is None
        self.has_jumping = self.is_combined and self.model.jumping != "none"
        # with jumping: functions that return the outputs of an earlier layer, given the begin and
        # the ids of a range of the last layer
        self.earlier: list[Callable[[int, Tensor], Tensor]] = []

    def outputs(self) -> Tensor:
        """Compute all layers, and return the outputs of the last one."""
        first = self._first_layer()
        table, row_of = self.table, None
        if self.model.input_linear is not None and not self._is_finished(first):
            table, row_of = self._project_features(), row_index(self.needed[0], self.graph)
        for index in range(self.num_layers):
            if index < first:
                self.advance(self.own_counts[index])
                self._remove_inputs(index)
                continue
            rows = self._compute_layer(index, table, row_of)
            self._remove_inputs(index)
            # frees the outputs of the previous layer
            table, row_of = rows.table(), row_index(self.needed[index + 1], self.graph)
            if self.has_jumping and index < self.num_layers - 1:
                self._keep_outputs(table, row_of)
        return table.rows

    def _first_layer(self) -> int:
        """Return the index of the last layer that is finished, or 0: earlier ones are not read."""
        finished = [index for index in range(self.num_layers) if self._is_finished(index)]
        is_done = self.num_layers - 1 in finished
        return finished[-1] if finished and (is_done or not self.has_jumping) else 0

    def _is_finished(self, index: int) -> bool:
        return self.store.is_finished(f"layer-{index + 1}")

    def _compute_layer(self, index: int, table: FeatureTable, row_of: Tensor | None) -> Rows:
        """Compute the output rows of a layer.

        Args:
            index: of the layer.
            table: its input rows.
            row_of: (N,) the row index of each node in `table`; None if that is the node's id.
        """
        model, store = self.model, self.store
        sources, targets = self.needed[index : index + 2]
        has_logits = self.is_combined and index == self.num_layers - 1
        columns = model.out_features if has_logits else model.widths[index]
        rows = self._rows(f"layer-{index + 1}", targets, columns)
        if rows.is_finished:
            self.advance(self.own_counts[index])
            return rows
        layer = FullLayer(model, index, self.graph, table, row_of, self.device, store)
        layer.prepare_sources(sources, self.batch_nodes)

        def compute(begin: int, end: int) -> list[Tensor]:
            ids = ids_of_range(targets, begin, end)
            found = layer.outputs(ids)
            if has_logits:
                found = model.combine([*(rows_of(begin, ids) for rows_of in self.earlier), found])
            return [found]

        store.compute([rows], self.shares[index], compute, self.advance)
        return rows

    def _rows(self, name: str, nodes: Tensor | None, columns: int) -> Rows:
        count = self.graph.num_nodes if nodes is None else len(nodes)
        return self.store.rows(name, count, columns, parameter_dtype(self.model))

    def _remove_inputs(self, index: int) -> None:
        """Delete the stored rows from which a layer was computed, which is finished."""
        names = ["input", f"messages-{index + 1}", f"scores-{index + 1}"]
        if not self.has_jumping:
            names.append(f"layer-{index}")
        elif index == self.num_layers - 1:
            names += [f"layer-{earlier + 1}" for earlier in range(index)]
        self.store.remove(names)

    def _keep_outputs(self, table: FeatureTable, row_of: Tensor | None) -> None:
        """Keep the outputs of a hidden layer, from which the logits are computed."""
        dtype = parameter_dtype(self.model)

        def rows_of(begin: int, ids: Tensor) -> Tensor:
            return gather_rows(table, ids if row_of is None else row_of[ids], self.device, dtype)

        if isinstance(self.store, Scratch):
            self.earlier.append(rows_of)
            return
        # the rows of this worker's ranges, so that the others are freed
        kept = {
            begin: rows_of(begin, ids_of_range(self.needed[-1], begin, end))
            for begin, end in self.own[-1]
        }
        self.earlier.append(lambda begin, ids: kept[begin])

    def _project_features(self) -> FeatureTable:
        """Return the first layer's inputs on the host, for the nodes that are needed."""
        model, nodes = self.model, self.needed[0]
        assert model.input_linear is not None, "the caller has checked"
        rows = self._rows("input", nodes, model.input_linear.out_features)
        count = self.graph.num_nodes if nodes is None else len(nodes)

        def compute(begin: int, end: int) -> list[Tensor]:
            ids = ids_of_range(nodes, begin, end)
            x = gather_rows(self.table, ids, self.device, parameter_dtype(model))
            return [model.transform_features(x)]

        shares = assign_equal_ranges(count, self.batch_nodes, self.store.group.world_size)
        self.store.compute([rows], shares, compute)
        return rows.table()


def fingerprint(*parts: Any) -> str:
    """Return a checksum of tensors and of other values, which have a `repr`; all are read."""
    digest = hashlib.sha256()
    for part in parts:
        text = repr(part)
        if isinstance(part, Tensor):
            text = f"{part.dtype} {tuple(part.shape)} {_fingerprint_of_rows(part.detach())}"
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _fingerprint_of_rows(rows: Tensor) -> str:
    rows = rows.view(1) if rows.ndim == 0 else rows
    row_bytes = rows[:1].numel() * rows.itemsize
    return checksum(lambda begin, end: rows[begin:end], len(rows), row_bytes)


def fingerprint_of_table(table: FeatureTable) -> str:
    """Return a checksum of the rows that are gathered from a table."""

    def read(begin: int, end: int) -> Tensor:
        return table.gather(torch.arange(begin, end, device=table.device), threads=1)

    row_bytes = table.num_columns * table.dtype.itemsize
    return fingerprint(table.dtype, checksum(read, table.num_rows, row_bytes))


def fingerprint_of_model(model: Model) -> str:
    """Return a checksum of a model's structure, parameters and buffers."""
    activation = getattr(model.activate, "__qualname__", repr(model.activate))
    order = model.pre_norm, model.pre_activation, model.adds_input, model.jumping
    state = [part for entry in model.state_dict().items() for part in entry]
    return fingerprint(model, activation, *order, *state)


def checksum(read: Callable[[int, int], Tensor], num_rows: int, row_bytes: int) -> str:
    """Return a checksum of rows.

    It is a SHA-256 of CRC-32s, which are computed in parallel. It detects accidental
    changes, not deliberate collisions.

    Args:
        read: `read(begin, end)` returns rows, on any device; several threads call it.
        num_rows: number of rows.
        row_bytes: bytes of a row.
    """
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))

    def code_of(begin: int) -> int:
        rows = read(begin, min(begin + step, num_rows)).cpu().contiguous()
        return zlib.crc32(bytes_of(rows))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        codes = list(threads.map(code_of, range(0, num_rows, step)))
    return hashlib.sha256(repr(codes).encode()).hexdigest()
