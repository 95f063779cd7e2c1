"""Layer-wise inference: the outputs of a model for all nodes, with all neighbours.

Several workers divide the ranges of nodes that one worker would compute, and compute each as one
worker would, so that the outputs are the same bits.

Letters: N nodes, M nodes asked for.
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

BATCH_NODES = 1 << 14  # targets at a time


BATCH_EDGES = 1 << 20  # and their edges, unless one target has more


# of targets of a small graph, so that there is something for each worker; their number may not
# depend on how many workers there are, since the outputs' bits do on what is computed at a time
LEAST_RANGES, LEAST_NODES = 64, 64


# that a worker sends at once to another machine; few enough for slow links to carry in time
PIECE_BYTES = 1 << 22


Progress = Callable[[int, int], object]  # called with (done, total)


Span: TypeAlias = tuple[int, int]


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
    """Return the logits of nodes with all their neighbours, computed layer by layer.

    The model computes as in evaluation, and is left in the mode it was in. Besides the features
    there is never more in memory than the rows of one layer and those of the next, and, while it
    runs, of a layer that makes rows narrower, their images. The workers of one machine hold these
    once.

    Args:
        model: on `device`.
        graph: of N nodes.
        table: (N, in_features), on the host or on `device`.
        device: where to compute; the rows of hidden layers stay on the host.
        nodes: (M,) int32 or int64 ids, on the host: a tensor, an array or a list; all nodes in
            order if None. Hidden layers are computed only for the nodes that these depend on.
        batch_nodes: targets at a time; fewer of a small graph.
        progress: called with (done, total), in nodes of all layers that this worker computes.
        group: workers that divide the nodes, all with the same arguments; this process alone if
            None.

    Returns:
        (M, classes) or (N, classes) on the host, the same on all workers. Those of one machine
        share its memory: do not write to it.

    Raises:
        TypeError: an argument of another type.
        ValueError: the table does not fit the graph or the model, a node is not in the graph, or an
            edge leads outside it, see `Graph.check`.
        RuntimeError: there is too little memory for the workers of a machine to share.
        WorkerLost: another worker is gone.
    """
    check_kind(
        "model",
        model,
        Model,
        "gcnzc.models.SAGE, GCN or GAT; another model computes the same on minibatches of a Loader "
        "with fanouts of -1",
    )
    check_graph(graph)
    check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows)")
    if group is not None:
        check_kind("group", group, Group, "gcnzc.exchange.present(), or None")
    if table.num_rows != graph.num_nodes:
        raise ValueError(
            f"the table has {table.num_rows} rows of features for a graph of {graph.num_nodes} "
            "nodes\n\nhint: row i is of node i"
        )
    check_columns(model, table.num_columns)
    graph.check()
    if nodes is not None:
        nodes = check_seeds("nodes", nodes, graph.num_nodes)
    device = check_device("device", device)
    batch_nodes = check_integer("batch_nodes", batch_nodes, 1)
    check_callable("progress", progress)
    batch_nodes = min(batch_nodes, max(LEAST_NODES, graph.num_nodes // LEAST_RANGES))
    needed = _needed(graph, len(model.layers), nodes, batch_nodes)
    crew = _InferenceWorkers(group or Group())
    shares = [_shares(graph, targets, batch_nodes, crew.count) for targets in needed[1:]]
    total = sum(end - begin for share in shares for begin, end in share[crew.rank])
    done, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            rows, place = table, None
            for index, (sources, targets) in enumerate(pairwise(needed)):
                step = _FullLayer(model, index, graph, rows, place, device)
                step.send(sources, batch_nodes, crew)
                count = graph.num_nodes if targets is None else len(targets)
                out = crew.empty(parameter_dtype(model), count, model.widths[index])
                with joint_work(crew.group) as work:
                    for begin, end in shares[index][crew.rank]:
                        ids = torch.arange(begin, end) if targets is None else targets[begin:end]
                        out[begin:end] = step.outputs(ids, is_range=targets is None)
                        done += end - begin
                        if progress is not None:
                            progress(done, total)
                        work.report_progress()
                crew.spread(out, shares[index], slice)
                # the rows before these may go
                rows, place = FeatureTable(out), _places(targets, graph)
                del step
    finally:
        model.train(was_training)
    return out


class _InferenceWorkers:
    """The workers that compute a layer together."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.count = group, group.rank, group.world_size
        # of each worker's machine
        self.firsts = first_workers(group)

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor on the host that the workers of this machine share."""
        return shared_empty(shape, dtype, self.group)

    def spread(
        self,
        rows: Tensor,
        shares: Sequence[Sequence[Span]],
        place: Callable[[int, int], slice | Tensor],
    ) -> None:
        """Bring rows that other machines have computed into this machine's memory.

        Args:
            rows: (n, ...), contiguous, shared by each machine.
            shares: of each worker, whose rows are all there.
            place: where among the rows those of a span lie.
        """
        if len(set(self.firsts)) == 1 or rows.numel() == 0:
            return
        rows = rows.view(len(rows), -1)
        spans = [(share[0][0], share[-1][1]) if share else (0, 0) for share in shares]
        step = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size()))
        for done in range(0, max(end - begin for begin, end in spans), step):
            pieces = [(min(b + done, end), min(b + done + step, end)) for b, end in spans]
            self._spread_pieces(rows, pieces, place)
        # for the workers whose first one has written
        run(all_gather_scalar(0), self.group)

    def _spread_pieces(
        self, rows: Tensor, pieces: Sequence[Span], place: Callable[[int, int], slice | Tensor]
    ) -> None:
        mine = self.firsts[self.rank]
        own, none = rows[place(*pieces[self.rank])].flatten(), rows.new_empty(0)
        # to the first workers of other machines
        parts = [own if rank == first != mine else none for rank, first in enumerate(self.firsts)]
        counts = [
            (end - begin) * rows.shape[1] if self.rank == mine != first else 0
            for (begin, end), first in zip(pieces, self.firsts, strict=True)
        ]
        for piece, part in zip(pieces, run(_to_all(parts, counts), self.group), strict=True):
            if len(part):
                rows[place(*piece)] = part.view(-1, rows.shape[1])


class _FullLayer:
    """One layer of a model over many nodes of a graph, with all their neighbours.

    On the CPU the sums read the rows of the sources where they lie. Elsewhere, or if the rows are
    not of the model's dtype, the rows of each range of targets are gathered first.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        graph: Graph,
        table: FeatureTable,
        place: Tensor | None,
        device: torch.device,
    ) -> None:
        self.model, self.index, self.graph, self.device = model, index, graph, device
        self.layer = cast(Layer, model.layers[index])
        # before the layer: rows, and in which of them a node is
        self.table, self.place = table, place
        # images of rows that are wider than themselves would only cost memory
        self.is_mapped = self.layer.heads * self.layer.out_features < self.layer.in_features
        # codes are of another dtype than what is gathered from them
        same = not table.is_sparse and table.rows.dtype == parameter_dtype(model)
        readable = same and not table.rows.is_cuda
        self.is_direct = device.type == "cpu" and (self.is_mapped or readable)
        self.neighbours = Sampler(graph, [-1])
        # what sources send
        self.sent, self.sent_place = table, place
        self.scores = torch.empty(0, 0)
        self.norms: Tensor | None = None

    def send(self, sources: Tensor | None, batch_nodes: int, crew: _InferenceWorkers) -> None:
        """Compute what `sources`, or all nodes, send, as far as it is computed ahead."""
        if not (self.is_mapped or self.is_direct):
            return
        num_rows = self.table.num_rows
        count = self.graph.num_nodes if sources is None else len(sources)
        dtype, images = parameter_dtype(self.model), None
        if self.is_mapped:
            num_rows, self.sent_place = count, _places(sources, self.graph)
            images = crew.empty(dtype, num_rows, self.layer.heads * self.layer.out_features)
        score_columns = self.layer.heads if self.layer.has_scores else 0
        self.scores = crew.empty(dtype, num_rows, score_columns)
        if self.layer.needs_degrees and self.is_direct:
            self.norms = crew.empty(dtype, num_rows)

        def place(begin: int, end: int) -> Tensor:
            ids = torch.arange(begin, end) if sources is None else sources[begin:end]
            return ids if self.sent_place is None else self.sent_place[ids].long()

        spans = [(at, min(at + batch_nodes, count)) for at in range(0, count, batch_nodes)]
        shares = _divided(spans, [end - begin for begin, end in spans], crew.count)
        with joint_work(crew.group) as work:
            for begin, end in shares[crew.rank]:
                ids = torch.arange(begin, end) if sources is None else sources[begin:end]
                at = place(begin, end)
                if self.norms is not None:
                    self.norms[at] = inverse_sqrt_degrees(_degrees(self.graph, ids), dtype)
                if self.is_mapped or self.layer.has_scores:
                    x = self._rows(self.table, self.place, ids)
                    if images is not None:
                        images[at] = self.layer.project(x).cpu()
                    self.scores[at] = self.layer.scores(x).cpu()
                work.report_progress()
        for rows in (images, self.scores, self.norms):
            if rows is not None:
                crew.spread(rows, shares, place)
        if images is not None:
            self.sent = FeatureTable(images)

    def outputs(self, ids: Tensor, *, is_range: bool) -> Tensor:
        """The rows of nodes `ids` after the layer; `is_range` if they are consecutive numbers."""
        receive = self._receive_direct if self.is_direct else self._receive_gathered
        return self.model.transform_output(self.index, receive(ids, is_range))

    def _receive_direct(self, ids: Tensor, is_range: bool) -> Tensor:
        bounds = slice(int(ids[0]), int(ids[-1]) + 1) if is_range else ids
        indptr, indices = _columns(self.graph, bounds)
        own = ids
        if self.sent_place is not None:
            indices, own = self.sent_place[indices], self.sent_place[ids].long()
        degrees = indptr.diff() if self.layer.needs_degrees else None
        return self.layer.compute_targets(
            Hop(indptr, indices, own, self.norms, degrees),
            self.sent.rows,
            self.scores,
            self._rows(self.table, self.place, ids),
            self.is_mapped,
        )

    def _receive_gathered(self, ids: Tensor, is_range: bool) -> Tensor:
        batch = self.neighbours.sample(ids, epoch=0)
        block = batch.blocks[0].to(self.device)
        rows = self._rows(self.sent, self.sent_place, batch.nodes)
        x_target = rows[: len(ids)]
        if not self.is_mapped:
            return self.layer(block, rows, x_target)
        at = batch.nodes if self.sent_place is None else self.sent_place[batch.nodes].long()
        norms = degrees = None
        if self.layer.needs_degrees:
            norms, degrees = (
                inverse_sqrt_degrees(block.in_degrees, rows.dtype),
                block.in_degrees[: len(ids)],
            )
        hop = Hop(block.indptr, block.indices, None, norms, degrees)
        x_target = self._rows(self.table, self.place, ids)
        scores = self.scores[at].to(self.device)
        return self.layer.compute_targets(hop, rows, scores, x_target, True)

    def _rows(self, table: FeatureTable, place: Tensor | None, ids: Tensor) -> Tensor:
        at = ids if place is None else place[ids]
        reads = self.device.type == "cuda" and not table.is_sparse and table.rows.is_pinned()
        rows = table.gather(at.to(self.device if reads else table.device))
        return rows.to(self.device, parameter_dtype(self.model))


def _needed(
    graph: Graph, num_layers: int, nodes: Tensor | None, batch_nodes: int
) -> list[Tensor | None]:
    """The nodes whose rows each layer reads, and at the end `nodes`; None for all."""
    needed = [nodes]
    for _ in range(num_layers):
        targets = needed[0]
        if targets is not None:
            seen = torch.zeros(graph.num_nodes, dtype=torch.bool)
            seen[targets] = True
            for begin, end in _ranges(graph, targets, batch_nodes):
                seen[_columns(graph, targets[begin:end])[1].long()] = True
            targets = None if seen.all() else seen.nonzero().flatten()
        needed.insert(0, targets)
    return needed


def _ranges(graph: Graph, ids: Tensor | None, batch_nodes: int) -> Iterator[Span]:
    """Ranges of `ids`, or of all nodes, of bounded numbers of nodes and of edges."""
    ends = _offsets(graph, ids)
    begin, count = 0, len(ends) - 1
    while begin < count:
        within = int(torch.searchsorted(ends, ends[begin] + BATCH_EDGES, right=True)) - 1
        end = min(max(within, begin + 1), begin + batch_nodes, count)
        yield begin, end
        begin = end


def _shares(graph: Graph, ids: Tensor | None, batch_nodes: int, parts: int) -> list[list[Span]]:
    """The ranges of each of so many workers, who have about as many nodes and edges each."""
    ends, spans = _offsets(graph, ids), list(_ranges(graph, ids, batch_nodes))
    return _divided(spans, [e - b + int(ends[e] - ends[b]) for b, e in spans], parts)


def _divided(spans: Sequence[Span], costs: Sequence[int], parts: int) -> list[list[Span]]:
    """Spans that follow each other, in so many parts that do, of about equal costs."""
    shares: list[list[Span]] = [[] for _ in range(parts)]
    before, total = 0, sum(costs)
    for span, cost in zip(spans, costs, strict=True):
        # by its middle
        shares[(2 * before + cost) * parts // (2 * total)].append(span)
        before += cost
    return shares


def _offsets(graph: Graph, ids: Tensor | None) -> Tensor:
    """(n + 1,) how many edges go into the nodes before each of `ids`, or of all nodes."""
    if ids is None:
        return graph.indptr
    return functional.pad(_degrees(graph, ids).cumsum(0), (1, 0))


def _to_all(parts: Sequence[Tensor], counts: Sequence[int]) -> Algorithm[list[Tensor]]:
    return (yield AllToAll(parts, counts))


def _columns(graph: Graph, ids: Tensor | slice) -> tuple[Tensor, Tensor]:
    """The in-edges of some nodes: indptr, and the sources by their numbers in the graph."""
    if isinstance(ids, slice):
        bounds = graph.indptr[ids.start : ids.stop + 1]
        return bounds - bounds[0], graph.indices[int(bounds[0]) : int(bounds[-1])]
    degrees = _degrees(graph, ids)
    indptr = functional.pad(degrees.cumsum(0), (1, 0))
    shift = (graph.indptr[ids] - indptr[:-1]).repeat_interleave(degrees)
    return indptr, graph.indices[torch.arange(len(shift)) + shift]


def _degrees(graph: Graph, ids: Tensor) -> Tensor:
    return graph.indptr[ids + 1] - graph.indptr[ids]


def _places(ids: Tensor | None, graph: Graph) -> Tensor | None:
    """(N,) where each node is in `ids`; None if they are all nodes in order."""
    if ids is None:
        return None
    place = torch.zeros(graph.num_nodes, dtype=graph.indices.dtype)
    place[ids] = torch.arange(len(ids), dtype=place.dtype)
    return place
