"""Layer-wise inference: compute the outputs of a model for all nodes, without sampling neighbours.

The nodes are divided into the same ranges for any number of workers, and each range is computed in
the same way, with layer outputs in memory or on disk, so that the results are bit-identical.

Notation: N nodes, M requested nodes.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model, check_columns, parameter_dtype
from gcnzc.sampling.neighbor import check_graph, check_seeds
from gcnzc.system.arguments import IdsLike, check_callable, check_device, check_integer, check_kind
from gcnzc.system.host_memory import available_bytes
from gcnzc.train.label_inputs import LabelledTable
from gcnzc.train.layerwise import ranges
from gcnzc.train.layerwise.layer import FullLayer, gather_rows
from gcnzc.train.layerwise.ranges import (
    BATCH_NODES,
    Span,
    assign_equal_ranges,
    assign_ranges,
    ids_of_range,
    limit_batch_nodes,
    needed_nodes,
    row_index,
)
from gcnzc.train.layerwise.scratch import Scratch, open_scratch
from gcnzc.train.layerwise.stored_rows import StoredRows
from gcnzc.train.layerwise.streamed_layer import StreamedLayer
from gcnzc.train.layerwise.workers import MemoryRows, Workers

# Checksums of models, graphs and features, which identify the rows stored for them.


# tensors are read in chunks, which threads checksum in parallel, and of which few are in memory
CHUNK_BYTES = 1 << 24


def fingerprint_of_model(model: Model) -> str:
    """Return a checksum of a model's structure, parameters and buffers."""
    activation = getattr(model.activate, "__qualname__", repr(model.activate))
    order = model.pre_norm, model.pre_activation, model.adds_input, model.jumping
    structure = repr(model), activation, *order
    digest = hashlib.sha256(repr(structure).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {checksum(value)}".encode())
    return digest.hexdigest()


def fingerprint_of_graph(graph: Graph) -> str:
    """Return a checksum of a graph's edges; all of them are read."""
    return _of_tensors([graph.indptr, graph.indices])


def fingerprint_of_table(table: FeatureTable) -> str:
    """Return a checksum of a feature table; all rows are read."""
    if isinstance(table, LabelledTable):
        assert table.table is not None, "as constructed"
        assert table.labels is not None, "as constructed"
        labels = _of_tensors([table.labels.values, table.labels.is_input])
        digest = hashlib.sha256(f"{fingerprint_of_table(table.table)} {labels}".encode())
        return digest.hexdigest()
    parts = [table.rows]
    if table.is_sparse:
        parts = [table.rows.crow_indices(), table.rows.col_indices(), table.rows.values()]
    scales = [] if table.scales is None else [table.scales]
    digest = hashlib.sha256(_of_tensors([*parts, *scales]).encode())
    digest.update(f"{table.num_rows} {table.num_columns} {table.scale_columns}".encode())
    return digest.hexdigest()


def _of_tensors(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {checksum(tensor)}".encode())
    return digest.hexdigest()


def checksum(tensor: Tensor) -> str:
    """Return a checksum of the elements of a strided tensor on any device.

    It is a SHA-256 of CRC-32s, which are computed in parallel. It detects accidental
    changes, not deliberate collisions.
    """
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    row_bytes = rows[:1].numel() * rows.element_size()
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))

    def code_of(begin: int) -> int:
        chunk = rows[begin : begin + step].cpu().contiguous().view(-1)
        return zlib.crc32(chunk.view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        codes = list(threads.map(code_of, range(0, len(rows), step)))
    return hashlib.sha256(repr(codes).encode()).hexdigest()


Progress: TypeAlias = Callable[[int, int], object]  # called with (done, total)

# the least memory for layer outputs
MIN_MEMORY = 1 << 20


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
            the graph. It also holds the input rows of the in-neighbours of one range if the device
            is a GPU, the model has `pre_norm` or `pre_activation`, or the dtype of the features is
            not the model's. Default: an eighth of the available memory.

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
    given = _check(model, graph, table, device, nodes, layer, batch_nodes, progress, group)
    positions = None
    if given.nodes is not None:
        # a node that is given twice is computed once
        distinct, inverse = given.nodes.unique(return_inverse=True)
        if len(distinct) < len(given.nodes):
            given, positions = replace(given, nodes=distinct), inverse
    if scratch is None and memory is not None:
        raise ValueError(
            f"memory is {memory}, but there is no folder for layer outputs that exceed it\n\n"
            "hint: also pass scratch, a folder on a disk"
        )
    if scratch is None:
        return _rows_at(positions, _compute(given, None))
    check_kind("scratch", scratch, (str, os.PathLike), "the path of a folder, or None")
    if memory is None:
        memory = max(MIN_MEMORY, available_bytes() // 8)
    memory = check_integer("memory", memory, MIN_MEMORY, hint="bytes, such as 2**30")
    with open_scratch(Path(scratch), memory, given.workers, lambda: _identity_of(given)) as opened:
        return _rows_at(positions, _compute(given, opened))


def _rows_at(positions: Tensor | None, rows: Tensor) -> Tensor:
    return rows if positions is None else rows[positions]


@dataclass(frozen=True)
class _Arguments:
    """The checked arguments of `inference`."""

    model: Model
    graph: Graph
    table: FeatureTable
    device: torch.device
    nodes: Tensor | None
    layer: int | None
    batch_nodes: int
    progress: Progress | None
    workers: Workers

    @property
    def num_layers(self) -> int:
        return self.layer or len(self.model.layers)


def _check(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device | str,
    nodes: IdsLike | None,
    layer: int | None,
    batch_nodes: int,
    progress: Progress | None,
    group: Group | None,
) -> _Arguments:
    check_kind("model", model, Model, "for others, compute outputs of a Loader with fanouts of -1")
    check_graph(graph)
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    if group is not None:
        check_kind("group", group, Group, "gcnzc.exchange.current_group(), or None")
    if table.num_rows != graph.num_nodes:
        raise ValueError(
            f"the table has {table.num_rows} rows of features for a graph of {graph.num_nodes} "
            "nodes\n\nhint: the table must have one row for each node"
        )
    check_columns(model, table.num_columns)
    graph.check()
    if nodes is not None:
        nodes = check_seeds("nodes", nodes, graph.num_nodes)
    device = check_device("device", device)
    check_has_values(model)
    batch_nodes = check_integer("batch_nodes", batch_nodes, 1)
    check_callable("progress", progress)
    if layer is not None:
        layer = check_integer("layer", layer, 1, len(model.layers))
    batch_nodes = limit_batch_nodes(graph, batch_nodes)
    workers = Workers(group or Group())
    return _Arguments(model, graph, table, device, nodes, layer, batch_nodes, progress, workers)


def check_has_values(model: Model) -> None:
    """Check that a model is not on the meta device, which has no values.

    Raises:
        ValueError: it is.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on the meta device, so its parameters have no values\n\n"
            "hint: model.to_empty(device=...), then load a state_dict()"
        )


def _identity_of(given: _Arguments) -> Mapping[str, Any]:
    """Return what layer outputs depend on, for `open_scratch`."""
    nodes, machine = "all", f"torch {torch.__version__}, {given.device.type}"
    if given.nodes is not None:
        nodes = f"{len(given.nodes)}: {checksum(given.nodes)}"
    limits = f"{given.batch_nodes} nodes, {ranges.BATCH_EDGES} edges"
    return {
        "model": fingerprint_of_model(given.model),
        "graph": fingerprint_of_graph(given.graph),
        "features": fingerprint_of_table(given.table),
        "nodes": hashlib.sha256(nodes.encode()).hexdigest(),
        "layer": given.layer,
        "ranges": limits,
        "versions": machine,
    }


def _compute(given: _Arguments, scratch: Scratch | None) -> Tensor:
    # rows are stored in the dtype of the model
    with evaluation_mode(given.model), torch.autocast(given.device.type, enabled=False):
        return _Computation(given, scratch).outputs()


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


class _Computation:
    """Computes the layers one after the other.

    Args:
        given: the arguments of `inference`.
        scratch: stores the rows; None to keep them in memory.
    """

    def __init__(self, given: _Arguments, scratch: Scratch | None) -> None:
        self.given, self.scratch, self.workers = given, scratch, given.workers
        self.needed = needed_nodes(given.graph, given.num_layers, given.nodes, given.batch_nodes)
        self.shares = [
            assign_ranges(given.graph, targets, given.batch_nodes, self.workers.count)
            for targets in self.needed[1:]
        ]
        rank = self.workers.rank
        self.total = sum(end - begin for share in self.shares for begin, end in share[rank])
        self.done = 0
        # whether the outputs of all layers are combined to the logits
        self.is_combined = given.layer is None
        self.has_jumping = self.is_combined and given.model.jumping != "none"
        # with jumping: for each of this worker's ranges, the outputs of the earlier layers; or with
        # a scratch folder, the tables of these layers, and the row index of each node
        self.earlier: list[list[Tensor]] = [[] for _ in self.shares[-1][rank]]
        self.earlier_tables: list[tuple[FeatureTable, Tensor | None]] = []

    def outputs(self) -> Tensor:
        """Compute all layers, and return the outputs of the last one."""
        given, model = self.given, self.given.model
        first = self._first_layer()
        table, row_of = given.table, None
        if model.input_linear is not None and not self._is_finished(first):
            table = self._project_features()
            row_of = row_index(self.needed[0], given.graph)
        for index, (sources, targets) in enumerate(pairwise(self.needed)):
            if index < first:
                self._advance(self.shares[index][self.workers.rank])
                self._remove_inputs(index)
                continue
            count = given.graph.num_nodes if targets is None else len(targets)
            is_last = index == given.num_layers - 1
            has_logits = is_last and self.is_combined
            columns = model.out_features if has_logits else model.widths[index]
            rows = self._rows(f"layer-{index + 1}", count, columns)
            if isinstance(rows, StoredRows) and rows.is_finished:
                self._advance(self.shares[index][self.workers.rank])
            else:
                self._compute_layer(index, sources, targets, table, row_of, rows)
            self._remove_inputs(index)
            # frees the outputs of the previous layer
            table, row_of = _table_of(rows), row_index(targets, given.graph)
            if self.has_jumping and not is_last:
                self._store_outputs(table, row_of)
        return table.rows

    def _first_layer(self) -> int:
        """Return the index of the last layer that is finished, or 0: earlier ones are not read."""
        if self.scratch is None:
            return 0
        finished = [i for i in range(self.given.num_layers) if self._is_finished(i)]
        is_done = self.given.num_layers - 1 in finished
        return finished[-1] if finished and (is_done or not self.has_jumping) else 0

    def _is_finished(self, index: int) -> bool:
        return self.scratch is not None and self.scratch.is_finished(f"layer-{index + 1}")

    def _compute_layer(
        self,
        index: int,
        sources: Tensor | None,
        targets: Tensor | None,
        table: FeatureTable,
        row_of: Tensor | None,
        rows: MemoryRows | StoredRows,
    ) -> None:
        given, workers = self.given, self.workers
        arguments = given.model, index, given.graph, table, row_of, given.device
        layer = (
            FullLayer(*arguments)
            if self.scratch is None
            else StreamedLayer(*arguments, self.scratch)
        )
        layer.prepare_sources(sources, given.batch_nodes, workers)
        has_logits = index == given.num_layers - 1 and self.is_combined
        with joint_work(workers.group) as work:
            for number, (begin, end) in enumerate(self.shares[index][workers.rank]):
                if not (isinstance(rows, StoredRows) and rows.has(begin, end)):
                    ids = ids_of_range(targets, begin, end)
                    found = layer.outputs(ids, is_range=targets is None)
                    if has_logits:
                        found = given.model.combine([*self._earlier(number, ids), found])
                    rows.write(begin, end, found)
                self._advance([(begin, end)])
                work.report_progress()
            if isinstance(rows, StoredRows):
                rows.sync()
        self._finish(rows, self.shares[index])

    def _remove_inputs(self, index: int) -> None:
        """Delete the stored rows from which a layer was computed, which is finished."""
        if self.scratch is None:
            return
        names = ["input", f"messages-{index + 1}", f"scores-{index + 1}"]
        if not self.has_jumping:
            names.append(f"layer-{index}")
        elif index == self.given.num_layers - 1:
            names += [f"layer-{earlier + 1}" for earlier in range(index)]
        self.scratch.remove(names)

    def _advance(self, spans: Sequence[Span]) -> None:
        self.done += sum(end - begin for begin, end in spans)
        if self.given.progress is not None and spans:
            self.given.progress(self.done, self.total)

    def _rows(self, name: str, count: int, columns: int) -> MemoryRows | StoredRows:
        dtype = parameter_dtype(self.given.model)
        if self.scratch is not None:
            return self.scratch.rows(name, count, columns, dtype)
        return MemoryRows(self.workers.empty(dtype, count, columns))

    def _finish(self, rows: MemoryRows | StoredRows, shares: Sequence[Sequence[Span]]) -> None:
        if isinstance(rows, StoredRows):
            assert self.scratch is not None, "rows are stored in it"
            self.scratch.finish(rows, shares)
        else:
            self.workers.distribute(rows, shares)

    def _store_outputs(self, table: FeatureTable, row_of: Tensor | None) -> None:
        """Store the outputs of a hidden layer, from which the logits are computed."""
        if self.scratch is not None:
            self.earlier_tables.append((table, row_of))
            return
        spans = self.shares[-1][self.workers.rank]
        for outputs, (begin, end) in zip(self.earlier, spans, strict=True):
            ids = ids_of_range(self.needed[-1], begin, end)
            at = ids if row_of is None else row_of[ids].long()
            outputs.append(table.rows[at].to(self.given.device))

    def _earlier(self, number: int, ids: Tensor) -> list[Tensor]:
        """Return the outputs of the earlier layers for a range of the last one."""
        if self.scratch is None:
            return self.earlier[number]
        device, dtype = self.given.device, parameter_dtype(self.given.model)
        return [
            gather_rows(table, ids if row_of is None else row_of[ids], device, dtype)
            for table, row_of in self.earlier_tables
        ]

    def _project_features(self) -> FeatureTable:
        """Return the first layer's inputs on the host, for the nodes that are needed."""
        given, model, workers = self.given, self.given.model, self.workers
        nodes = self.needed[0]
        count = given.graph.num_nodes if nodes is None else len(nodes)
        assert model.input_linear is not None, "the caller has checked"
        rows = self._rows("input", count, model.input_linear.out_features)
        if isinstance(rows, StoredRows) and rows.is_finished:
            return rows.table()
        shares = assign_equal_ranges(count, given.batch_nodes, workers.count)
        with joint_work(workers.group) as work:
            for begin, end in shares[workers.rank]:
                if not (isinstance(rows, StoredRows) and rows.has(begin, end)):
                    ids = ids_of_range(nodes, begin, end)
                    x = gather_rows(given.table, ids, given.device, parameter_dtype(model))
                    rows.write(begin, end, model.transform_features(x))
                work.report_progress()
            if isinstance(rows, StoredRows):
                rows.sync()
        self._finish(rows, shares)
        return _table_of(rows)


def _table_of(rows: MemoryRows | StoredRows) -> FeatureTable:
    return rows.table() if isinstance(rows, StoredRows) else FeatureTable(rows.tensor)
