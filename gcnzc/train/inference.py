"""Layer-wise inference: compute the outputs of a model for all nodes, without sampling neighbours.

The nodes are divided into the same ranges for any number of workers, and each range is computed in
the same way, so that the outputs are bit-identical.

Notation: N nodes, M requested nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.exchange import Algorithm, AllToAll, Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.gnn import Model, check_columns, parameter_dtype
from gcnzc.models.layers import Hop, Layer, inverse_sqrt_degrees
from gcnzc.sampling.neighbor import Sampler, check_graph, check_seeds
from gcnzc.system.arguments import IdsLike, check_callable, check_device, check_integer, check_kind
from gcnzc.train.shared_data import first_workers, shared_empty

BATCH_NODES = 1 << 14  # maximum targets of a range
BATCH_EDGES = 1 << 20  # maximum in-edges of a range of several targets

# A range has at most a 64th of the graph's nodes, or 64 nodes if that is more, so that a small
# graph is divided among workers, too. Ranges must not depend on the number of workers, because
# they determine how outputs are rounded.
MIN_RANGES, MIN_NODES = 64, 64

# maximum bytes that a worker sends in one all-to-all: it must not time out on a slow network
PIECE_BYTES = 1 << 22

Progress = Callable[[int, int], object]  # called with (done, total)
Span: TypeAlias = tuple[int, int]  # begin and end of a range


def inference(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device | str = "cpu",
    *,
    nodes: IdsLike | None = None,
    batch_nodes: int = BATCH_NODES,
    progress: Progress | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the logits of nodes layer by layer, without sampling neighbours.

    The model runs in evaluation mode; its mode is restored afterwards. Host memory holds the
    features, the input rows and the output rows of the current layer, and its projected rows if
    they have fewer columns than its input or the layer is GATv2's. The workers of one machine share
    this memory.

    Args:
        model: a model on `device`.
        graph: the whole graph, with N nodes.
        table: (N, in_features) features, on the host or on `device`.
        device: device of the computation; the rows of hidden layers stay on the host.
        nodes: (M,) int32 or int64 node ids, on the host: a tensor, an array or a list. Hidden
            layers are computed only for the nodes that these depend on. Default: all, in order.
        batch_nodes: maximum number of nodes that are computed at a time. There are fewer if the
            graph is small, or if their in-edges would exceed 2**20.
        progress: called with (done, total): the output rows that this worker has computed, and
            those that it computes in all layers.
        group: the workers among which the nodes are divided; all pass the same arguments. Default:
            this process only.

    Returns:
        (M, classes) or (N, classes) on the host, the same on all workers. The workers of one
        machine share this memory: do not write to it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the table does not match the graph or the model, a node is not in the graph, or
            the graph has an offset or a source out of range, see `Graph.check`.
        RuntimeError: there is too little memory for the workers of a machine to share.
        WorkerLost: another worker has failed.
    """
    check_kind(
        "model",
        model,
        Model,
        "pass a model of gcnzc.models; for another one, compute its outputs on minibatches "
        "of a Loader with fanouts of -1",
    )
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
    batch_nodes = check_integer("batch_nodes", batch_nodes, 1)
    check_callable("progress", progress)
    batch_nodes = min(batch_nodes, max(MIN_NODES, graph.num_nodes // MIN_RANGES))
    needed = _needed_nodes(graph, len(model.layers), nodes, batch_nodes)
    workers = _Workers(group or Group())
    shares = [_assign_ranges(graph, targets, batch_nodes, workers.count) for targets in needed[1:]]
    total = sum(end - begin for share in shares for begin, end in share[workers.rank])
    done, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            rows, row_of = table, None
            if model.input_linear is not None:
                rows = _project_features(model, table, needed[0], batch_nodes, device, workers)
                row_of = _row_index(needed[0], graph)
            own_spans = shares[-1][workers.rank]
            # with jumping: for each of this worker's ranges, the outputs of the earlier layers
            earlier: list[list[Tensor]] = [[] for _ in own_spans]
            for index, (sources, targets) in enumerate(pairwise(needed)):
                step = _FullLayer(model, index, graph, rows, row_of, device)
                step.prepare_sources(sources, batch_nodes, workers)
                is_last = index == len(model.layers) - 1
                count = graph.num_nodes if targets is None else len(targets)
                columns = model.out_features if is_last else model.widths[index]
                out = workers.empty(parameter_dtype(model), count, columns)
                with joint_work(workers.group) as work:
                    for number, (begin, end) in enumerate(shares[index][workers.rank]):
                        ids = torch.arange(begin, end) if targets is None else targets[begin:end]
                        found = step.outputs(ids, is_range=targets is None)
                        if is_last:
                            found = model.combine([*earlier[number], found])
                        out[begin:end] = found
                        done += end - begin
                        if progress is not None:
                            progress(done, total)
                        work.report_progress()
                workers.distribute(out, shares[index], slice)
                # frees the rows of the previous layer
                rows, row_of = FeatureTable(out), _row_index(targets, graph)
                del step
                if model.jumping != "none" and not is_last:
                    for kept, (begin, end) in zip(earlier, own_spans, strict=True):
                        ids = torch.arange(begin, end)
                        ids = ids if needed[-1] is None else needed[-1][begin:end]
                        at = ids if row_of is None else row_of[ids].long()
                        kept.append(out[at].to(device))
    finally:
        model.train(was_training)
    return out


def _project_features(
    model: Model,
    table: FeatureTable,
    nodes: Tensor | None,
    batch_nodes: int,
    device: torch.device,
    workers: "_Workers",
) -> FeatureTable:
    """Return the first layer's inputs on the host, for `nodes` or for all nodes."""
    count = table.num_rows if nodes is None else len(nodes)
    assert model.input_linear is not None
    width = model.input_linear.out_features
    out = workers.empty(parameter_dtype(model), count, width)
    spans = [(at, min(at + batch_nodes, count)) for at in range(0, count, batch_nodes)]
    shares = _divide_spans(spans, [end - begin for begin, end in spans], workers.count)
    with joint_work(workers.group) as work:
        for begin, end in shares[workers.rank]:
            ids = torch.arange(begin, end) if nodes is None else nodes[begin:end]
            x = _gathered_rows(table, ids, device, parameter_dtype(model))
            out[begin:end] = model.transform_features(x)
            work.report_progress()
    workers.distribute(out, shares, slice)
    return FeatureTable(out)


class _Workers:
    """The workers among which the computation of a layer is divided."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.count = group, group.rank, group.world_size
        # for each rank, the lowest rank on the same machine
        self.firsts = first_workers(group)

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Allocate a tensor in host memory that the workers of this machine share."""
        return shared_empty(shape, dtype, self.group)

    def distribute(
        self,
        rows: Tensor,
        shares: Sequence[Sequence[Span]],
        indices_of: Callable[[int, int], slice | Tensor],
    ) -> None:
        """Copy the rows that each machine has computed to all other machines.

        Args:
            rows: (n, ...), contiguous, in memory that the workers of a machine share.
            shares: the spans that each worker has computed.
            indices_of: `indices_of(begin, end)` returns the indices of a span in `rows`.
        """
        if len(set(self.firsts)) == 1 or rows.numel() == 0:
            return
        rows = rows.view(len(rows), -1)
        spans = [(share[0][0], share[-1][1]) if share else (0, 0) for share in shares]
        step = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size()))
        for done in range(0, max(end - begin for begin, end in spans), step):
            pieces = [(min(b + done, end), min(b + done + step, end)) for b, end in spans]
            self._distribute_pieces(rows, pieces, indices_of)
        # a barrier: the first worker of each machine has written the rows
        run(all_gather_scalar(0), self.group)

    def _distribute_pieces(
        self,
        rows: Tensor,
        pieces: Sequence[Span],
        indices_of: Callable[[int, int], slice | Tensor],
    ) -> None:
        own_first = self.firsts[self.rank]
        own, none = rows[indices_of(*pieces[self.rank])].flatten(), rows.new_empty(0)
        # each worker sends its rows to the first workers of the other machines
        parts = [
            own if rank == first != own_first else none for rank, first in enumerate(self.firsts)
        ]
        counts = [
            (end - begin) * rows.shape[1] if self.rank == own_first != first else 0
            for (begin, end), first in zip(pieces, self.firsts, strict=True)
        ]
        for piece, part in zip(pieces, run(_all_to_all(parts, counts), self.group), strict=True):
            if len(part):
                rows[indices_of(*piece)] = part.view(-1, rows.shape[1])


class _FullLayer:
    """Computes one layer of a model for many nodes, with all their neighbours.

    On the CPU, rows are aggregated in place if they are projected, or dense, on the host and of the
    model's dtype. Otherwise the rows of the sources are gathered for each range of targets.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        graph: Graph,
        table: FeatureTable,
        row_of: Tensor | None,
        device: torch.device,
    ) -> None:
        self.model, self.index, self.graph, self.device = model, index, graph, device
        self.layer = cast(Layer, model.layers[index])
        # the layer's input rows, and the row index of each node; None if that is the node's id
        self.table, self.row_of = table, row_of
        # rows are projected before the aggregation if that makes them smaller
        is_smaller = self.layer.heads * self.layer.out_features < self.layer.in_features
        self.is_projected = is_smaller or self.layer.must_project_first
        # a gather also dequantizes rows and converts their dtype
        has_same_dtype = not table.is_sparse and table.rows.dtype == parameter_dtype(model)
        is_readable = has_same_dtype and not table.rows.is_cuda and not model.pre_norm
        self.is_in_place = device.type == "cpu" and (self.is_projected or is_readable)
        self.neighbours = Sampler(graph, [-1])
        # the rows that are aggregated: input rows, or projected rows
        self.aggregated, self.aggregated_row_of = table, row_of
        self.scores = torch.empty(0, 0)
        self.norms: Tensor | None = None

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int, workers: _Workers) -> None:
        """Compute the projected rows, attention scores and norms of `sources` or of all nodes."""
        if not (self.is_projected or self.is_in_place):
            return
        num_rows = self.table.num_rows
        count = self.graph.num_nodes if sources is None else len(sources)
        dtype, projected = parameter_dtype(self.model), None
        if self.is_projected:
            num_rows, self.aggregated_row_of = count, _row_index(sources, self.graph)
            projected = workers.empty(dtype, num_rows, self.layer.heads * self.layer.out_features)
        score_columns = self.layer.heads if self.layer.has_scores else 0
        self.scores = workers.empty(dtype, num_rows, score_columns)
        if self.layer.needs_degrees and self.is_in_place:
            self.norms = workers.empty(dtype, num_rows)

        def indices_of(begin: int, end: int) -> Tensor:
            ids = torch.arange(begin, end) if sources is None else sources[begin:end]
            return ids if self.aggregated_row_of is None else self.aggregated_row_of[ids].long()

        spans = [(at, min(at + batch_nodes, count)) for at in range(0, count, batch_nodes)]
        shares = _divide_spans(spans, [end - begin for begin, end in spans], workers.count)
        with joint_work(workers.group) as work:
            for begin, end in shares[workers.rank]:
                ids = torch.arange(begin, end) if sources is None else sources[begin:end]
                at = indices_of(begin, end)
                if self.norms is not None:
                    self.norms[at] = inverse_sqrt_degrees(_degrees(self.graph, ids), dtype)
                if self.is_projected or self.layer.has_scores:
                    x = self._inputs(ids)
                    if projected is not None:
                        projected[at] = self.layer.project(x).cpu()
                    self.scores[at] = self.layer.scores(x).cpu()
                work.report_progress()
        for rows in (projected, self.scores, self.norms):
            if rows is not None:
                workers.distribute(rows, shares, indices_of)
        if projected is not None:
            self.aggregated = FeatureTable(projected)

    def outputs(self, ids: Tensor, *, is_range: bool) -> Tensor:
        """Compute the output rows of nodes `ids`, which are consecutive if `is_range`."""
        aggregate = self._aggregate_in_place if self.is_in_place else self._aggregate_gathered
        out, x_target = aggregate(ids, is_range)
        return self.model.transform_output(self.index, out, x_target)

    def _aggregate_in_place(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        bounds = slice(int(ids[0]), int(ids[-1]) + 1) if is_range else ids
        indptr, indices = _in_edges(self.graph, bounds)
        own = ids
        if self.aggregated_row_of is not None:
            indices, own = self.aggregated_row_of[indices], self.aggregated_row_of[ids].long()
        degrees = indptr.diff() if self.layer.needs_degrees else None
        hop = Hop(indptr, indices, own, self.norms, degrees)
        x_target = self._inputs(ids)
        out = self.layer.compute_targets(
            hop, self.aggregated.rows, self.scores, x_target, self.is_projected
        )
        return out, x_target

    def _aggregate_gathered(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        batch = self.neighbours.sample(ids, epoch=0)
        block = batch.blocks[0].to(self.device)
        if not self.is_projected:
            rows = self._inputs(batch.nodes)
            return self.layer(block, rows, rows[: len(ids)]), rows[: len(ids)]
        rows = self._rows(self.aggregated, self.aggregated_row_of, batch.nodes)
        at = batch.nodes
        if self.aggregated_row_of is not None:
            at = self.aggregated_row_of[at].long()
        norms = degrees = None
        if self.layer.needs_degrees:
            norms, degrees = (
                inverse_sqrt_degrees(block.in_degrees, rows.dtype),
                block.in_degrees[: len(ids)],
            )
        hop = Hop(block.indptr, block.indices, None, norms, degrees)
        x_target = self._inputs(ids)
        scores = self.scores[at].to(self.device)
        return self.layer.compute_targets(hop, rows, scores, x_target, True), x_target

    def _inputs(self, ids: Tensor) -> Tensor:
        """Return the layer's input rows of nodes, on its device."""
        return self.model.normalize_input(self.index, self._rows(self.table, self.row_of, ids))

    def _rows(self, table: FeatureTable, row_of: Tensor | None, ids: Tensor) -> Tensor:
        at = ids if row_of is None else row_of[ids]
        return _gathered_rows(table, at, self.device, parameter_dtype(self.model))


def _gathered_rows(
    table: FeatureTable, at: Tensor, device: torch.device, dtype: torch.dtype
) -> Tensor:
    is_zero_copy = device.type == "cuda" and not table.is_sparse and table.rows.is_pinned()
    return table.gather(at.to(device if is_zero_copy else table.device)).to(device, dtype)


def _needed_nodes(
    graph: Graph, num_layers: int, nodes: Tensor | None, batch_nodes: int
) -> list[Tensor | None]:
    """Return each layer's source nodes, input layer first, then `nodes`; None means all nodes."""
    needed = [nodes]
    for _ in range(num_layers):
        targets = needed[0]
        if targets is not None:
            seen = torch.zeros(graph.num_nodes, dtype=torch.bool)
            seen[targets] = True
            for begin, end in _ranges(graph, targets, batch_nodes):
                seen[_in_edges(graph, targets[begin:end])[1].long()] = True
            targets = None if seen.all() else seen.nonzero().flatten()
        needed.insert(0, targets)
    return needed


def _ranges(graph: Graph, ids: Tensor | None, batch_nodes: int) -> Iterator[Span]:
    """Yield ranges of `ids`, or of all nodes, with bounded numbers of nodes and edges."""
    ends = _offsets(graph, ids)
    begin, count = 0, len(ends) - 1
    while begin < count:
        edge_limit = int(torch.searchsorted(ends, ends[begin] + BATCH_EDGES, right=True)) - 1
        end = min(max(edge_limit, begin + 1), begin + batch_nodes, count)
        yield begin, end
        begin = end


def _assign_ranges(
    graph: Graph, ids: Tensor | None, batch_nodes: int, num_workers: int
) -> list[list[Span]]:
    """Assign ranges of nodes to workers, with about equal sums of nodes and edges."""
    ends, spans = _offsets(graph, ids), list(_ranges(graph, ids, batch_nodes))
    return _divide_spans(spans, [e - b + int(ends[e] - ends[b]) for b, e in spans], num_workers)


def _divide_spans(
    spans: Sequence[Span], costs: Sequence[int], num_workers: int
) -> list[list[Span]]:
    """Divide consecutive spans into one consecutive group per worker, of about equal cost."""
    shares: list[list[Span]] = [[] for _ in range(num_workers)]
    before, total = 0, sum(costs)
    for span, cost in zip(spans, costs, strict=True):
        # a span belongs to the group that contains the middle of its cost
        shares[(2 * before + cost) * num_workers // (2 * total)].append(span)
        before += cost
    return shares


def _offsets(graph: Graph, ids: Tensor | None) -> Tensor:
    """Return the cumulative in-degrees of `ids` or of all nodes, (n + 1,), starting with 0."""
    if ids is None:
        return graph.indptr
    return functional.pad(_degrees(graph, ids).cumsum(0), (1, 0))


def _all_to_all(parts: Sequence[Tensor], counts: Sequence[int]) -> Algorithm[list[Tensor]]:
    return (yield AllToAll(parts, counts))


def _in_edges(graph: Graph, ids: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Return the in-edges of nodes in CSC format: indptr, and the node ids of the sources."""
    if isinstance(ids, slice):
        bounds = graph.indptr[ids.start : ids.stop + 1]
        return bounds - bounds[0], graph.indices[int(bounds[0]) : int(bounds[-1])]
    degrees = _degrees(graph, ids)
    indptr = functional.pad(degrees.cumsum(0), (1, 0))
    shift = (graph.indptr[ids] - indptr[:-1]).repeat_interleave(degrees)
    return indptr, graph.indices[torch.arange(len(shift)) + shift]


def _degrees(graph: Graph, ids: Tensor) -> Tensor:
    return graph.indptr[ids + 1] - graph.indptr[ids]


def _row_index(ids: Tensor | None, graph: Graph) -> Tensor | None:
    """Return (N,) positions of nodes in `ids`, or None if `ids` is None (all nodes in order)."""
    if ids is None:
        return None
    row_of = torch.zeros(graph.num_nodes, dtype=graph.indices.dtype)
    row_of[ids] = torch.arange(len(ids), dtype=row_of.dtype)
    return row_of
