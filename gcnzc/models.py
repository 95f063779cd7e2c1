"""GraphSAGE, GCN and GAT on blocks, and their outputs for every node of a graph.

Each layer is one class that knows its formula; a model is a stack of layers with a normalisation,
an activation and dropout between them. A linear map and a sum over neighbours may be taken in
either order, so each layer takes the cheaper one for the block at hand.

Letters: S sources, T targets, E edges of a block, H heads, F columns (of a head), N nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.graph import Graph
from gcnzc.kernels.aggregate import aggregate
from gcnzc.kernels.attend import attend
from gcnzc.kernels.dropout import dropout
from gcnzc.sampler import Block, Sampler, demand_seeds
from gcnzc.table import FeatureTable

# what a column of an edge costs, in multiplications of a linear map; bench/aggregate.py says why
EDGE_COST = 8
BATCH_NODES = 1 << 14  # targets at a time in `inference`
BATCH_EDGES = 1 << 20  # and their edges, unless one target has more

Progress = Callable[[int, int], object]  # called with (done, total)


@dataclass(frozen=True)
class Hop:
    """The edges that a layer sums over, and what GCN needs of the whole graph."""

    indptr: Tensor  # (T + 1,)
    indices: Tensor  # (E,) rows of the sources
    own: Tensor | None  # (T,) each target's row among the sources; None: target t has row t
    source_norms: Tensor | None = None  # (S,) one over the root of the degree, loop included
    target_degrees: Tensor | None = None  # (T,) in the graph, without the loop

    @property
    def num_targets(self) -> int:
        """T."""
        return self.indptr.shape[0] - 1

    def of_targets(self, rows: Tensor) -> Tensor:
        """The targets' rows among those of the sources."""
        return rows[: self.num_targets] if self.own is None else rows[self.own]


class Layer(nn.Module):
    """One layer: what sources send, and what targets make of what they receive."""

    needs_degrees = False  # of the graph
    has_scores = False

    def __init__(self, in_features: int, out_features: int, heads: int = 1) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features  # of one head, if there are heads
        self.heads = heads

    def maps_first(self, num_sources: int, num_targets: int, num_edges: int) -> bool:
        """Whether to map all sources and sum the images costs less than to map the sums."""
        map_cost = self.in_features * self.heads * self.out_features
        first = num_sources * map_cost + EDGE_COST * num_edges * self.heads * self.out_features
        # the heads share a row that is not mapped: it is read once, and weighed in the cache
        shared = self.in_features * (3 + self.heads) / 4
        return first < num_targets * map_cost + EDGE_COST * num_edges * shared

    def mapped(self, x: Tensor) -> Tensor:
        """The images of rows (n, in_features) that sources send: (n, heads * out_features)."""
        raise NotImplementedError

    def scores(self, x: Tensor) -> Tensor:
        """What sources send besides: (n, heads), or (n, 0) of a layer without attention."""
        return x[:, :0]

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """The outputs of the targets, from the rows that `hop.indices` point at."""
        raise NotImplementedError

    def forward(self, block: Block, x_source: Tensor, x_target: Tensor) -> Tensor:
        """Compute the layer on a block.

        Args:
            block: S sources, T targets.
            x_source: (S, in_features) on the device of the block.
            x_target: (T, in_features), the first T rows of `x_source`.

        Returns:
            (T, columns).
        """
        hop = Hop(block.indptr, block.indices, None)
        if self.needs_degrees:
            norms = _norms(block.in_degrees, x_source.dtype)
            hop = Hop(hop.indptr, hop.indices, None, norms, block.in_degrees[: block.num_dst])
        is_mapped = self.maps_first(block.num_src, block.num_dst, block.indices.shape[0])
        rows = self.mapped(x_source) if is_mapped else x_source
        return self.receive(hop, rows, self.scores(x_source), x_target, is_mapped)


class SAGELayer(Layer):
    """`W mean(x of in-neighbours) + b + V x`: Hamilton et al., 2017."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.neighbours = nn.Linear(in_features, out_features)
        self.own = nn.Linear(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights as `torch.nn.Linear` does, and PyG with it."""
        self.neighbours.reset_parameters()
        self.own.reset_parameters()

    def mapped(self, x: Tensor) -> Tensor:
        """W x."""
        return functional.linear(x, self.neighbours.weight)

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        mean = aggregate(
            hop.indptr, hop.indices, rows, None, 1 / hop.indptr.diff().clamp(min=1).to(rows.dtype)
        )
        out = mean + self.neighbours.bias if is_mapped else self.neighbours(mean)
        return out.addmm_(x_target, self.own.weight.t())


class GCNLayer(Layer):
    """`W sum(x[s] / sqrt((d[s] + 1) (d[t] + 1))) + b` with a self loop: Kipf and Welling, 2017.

    Degrees `d` are those in the whole graph. Of a target that keeps k of its d in-neighbours, their
    sum counts d / k times, so that it estimates the sum over all. A self loop that is in the graph
    counts as an edge like any other.
    """

    needs_degrees = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights as Glorot and Bengio do; no bias."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def mapped(self, x: Tensor) -> Tensor:
        """W x."""
        return functional.linear(x, self.weight)

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        assert hop.target_degrees is not None, "layers that need degrees are given them"
        norms = _norms(hop.target_degrees, rows.dtype)
        kept = hop.indptr.diff().clamp(min=1)
        total = aggregate(
            hop.indptr, hop.indices, rows, hop.source_norms, norms * hop.target_degrees / kept
        )
        total.addcmul_(hop.of_targets(rows), norms.square()[:, None])
        return total + self.bias if is_mapped else functional.linear(total, self.weight, self.bias)


class GATLayer(Layer):
    """Attention over the in-neighbours and the target itself: Veličković et al., 2018.

    As PyG's `GATConv`, plus a linear skip connection from the target.

    Args:
        in_features: columns of a row.
        out_features: columns of a head.
        heads: how many.
        concatenate: give the heads side by side; else their mean.
        dropout: the share of the attention weights left out in training.
        skip: add a linear map of the target's own row.
    """

    has_scores = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        *,
        concatenate: bool,
        dropout: float,
        skip: bool,
    ) -> None:
        super().__init__(in_features, out_features, heads)
        columns = heads * out_features if concatenate else out_features
        self.concatenate = concatenate
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(heads, out_features, in_features))
        self.source_attention = nn.Parameter(torch.empty(heads, out_features))
        self.target_attention = nn.Parameter(torch.empty(heads, out_features))
        self.bias = nn.Parameter(torch.empty(columns))
        self.skip = nn.Linear(in_features, columns) if skip else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights as PyG does: Glorot and Bengio's over all heads; no bias."""
        nn.init.xavier_uniform_(self.weight.view(-1, self.in_features))
        nn.init.xavier_uniform_(self.source_attention)
        nn.init.xavier_uniform_(self.target_attention)
        nn.init.zeros_(self.bias)
        if self.skip is not None:
            self.skip.reset_parameters()

    def mapped(self, x: Tensor) -> Tensor:
        """W x, the heads side by side."""
        return functional.linear(x, self.weight.flatten(0, 1))

    def scores(self, x: Tensor) -> Tensor:
        """What a source's row adds to the score of its edges."""
        return self._scores(x, self.source_attention)

    def _scores(self, x: Tensor, attention_HF: Tensor) -> Tensor:
        # a (W x) is (a W) x, which needs no image of x
        return x @ (attention_HF[:, None, :] @ self.weight).squeeze(1).t()

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        parts = self.heads if is_mapped else 1
        out_THF = attend(
            hop.indptr,
            hop.indices,
            rows.view(len(rows), parts, -1),
            scores,
            self._scores(x_target, self.target_attention),
            own=hop.own,
            dropout=self.dropout if self.training else 0.0,
            seed=_draw_seed() if self.training and self.dropout else 0,
        )
        if not is_mapped:
            out_THF = (out_THF.transpose(0, 1) @ self.weight.mT).transpose(0, 1)
        out = (out_THF.flatten(1) if self.concatenate else out_THF.mean(1)) + self.bias
        return out if self.skip is None else self.skip(x_target).add_(out)


def _draw_seed() -> int:
    # from torch's generator, so that `torch.manual_seed` decides as usual
    return int(torch.randint(2**63 - 1, ()))


def _norms(degrees: Tensor, dtype: torch.dtype) -> Tensor:
    return (degrees + 1).to(dtype).rsqrt()


class Model(nn.Module):
    """Layers, with batch normalisation, an activation and dropout between them.

    Args:
        layers: the first reads the features, the last gives the logits.
        widths: columns of each layer's output.
        activation: between layers; may write over its argument.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        batch_norm: normalise the columns between layers.

    Raises:
        ValueError: a dropout outside [0, 1).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        widths: Sequence[int],
        activation: Callable[[Tensor], Tensor],
        *,
        dropout: float,
        input_dropout: float,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        for name, share in (("dropout", dropout), ("input_dropout", input_dropout)):
            _demand_share(name, share)
        self.layers = nn.ModuleList(layers)
        hidden = widths[:-1] if batch_norm else []
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in hidden)
        self.widths = tuple(widths)
        self.activation = activation
        self.dropout = dropout
        self.input_dropout = input_dropout

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        for part in (*self.layers, *self.norms):
            part.reset_parameters()

    def between(self, index: int, x: Tensor) -> Tensor:
        """What happens to the output of layer `index` before the next layer."""
        if index == len(self.layers) - 1:
            return x
        if self.norms:
            x = self.norms[index](x)
        return self._drop(self.activation(x), self.dropout)

    def _drop(self, x: Tensor, share: float) -> Tensor:
        if not self.training or share == 0:
            return x
        return dropout(x, share, _draw_seed())

    def forward(self, blocks: Sequence[Block], x: Tensor) -> Tensor:
        """Return the logits of the seeds.

        Args:
            blocks: one a layer, input layer first, as a `Batch` has them.
            x: (B, in_features) features of the sources of the first block, on its device; of half
                precision too.

        Returns:
            (seeds, classes).

        Raises:
            ValueError: another number of blocks than layers, or `x` has other rows or columns than
                are asked for.
        """
        layers = len(self.layers)
        if len(blocks) != layers:
            raise ValueError(
                f"{len(blocks)} blocks for a model of {layers} layers\n\n"
                "hint: give as many fan-outs as the model has layers"
            )
        _demand_columns(self, x.shape[1])
        if len(x) != blocks[0].num_src:
            raise ValueError(
                f"{len(x)} rows of features for a first block of {blocks[0].num_src} sources\n\n"
                "hint: pass the features of batch.nodes, in their order"
            )
        x = self._drop(x.to(_dtype(self)), self.input_dropout)
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = self.between(index, layer(block, x, x[: block.num_dst]))
        return x


class SAGE(Model):
    """GraphSAGE with the mean of the neighbours, as OGB's examples have it.

    Args:
        in_features: columns of the features.
        hidden: columns between layers.
        num_classes: columns of the logits.
        num_layers: how many, and how many fan-outs.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        batch_norm: normalise the columns between layers.

    Raises:
        ValueError: no layers, or a dropout outside [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        widths = _widths(hidden, num_classes, num_layers)
        super().__init__(
            [SAGELayer(*ends) for ends in pairwise([in_features, *widths])],
            widths,
            functional.relu_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GCN(Model):
    """The graph convolutional network, as OGB's examples have it.

    Its arguments are those of `SAGE`. Blocks must know their graph, as those of a `Sampler` do.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        widths = _widths(hidden, num_classes, num_layers)
        super().__init__(
            [GCNLayer(*ends) for ends in pairwise([in_features, *widths])],
            widths,
            functional.relu_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GAT(Model):
    """The graph attention network: heads side by side, and the mean of them in the last layer.

    With the defaults it is that of OGB's example for ogbn-products. The network of Veličković et
    al. for Cora is `GAT(1433, 8, 7, 2, 0.6, heads=8, output_heads=1, input_dropout=0.6,
    attention_dropout=0.6, skip=False)`.

    Args:
        in_features: columns of the features.
        hidden: columns of each head between layers.
        num_classes: columns of the logits.
        num_layers: how many, and how many fan-outs.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        heads: of every layer but the last.
        output_heads: of the last layer; as many as `heads` if None.
        attention_dropout: the share of the neighbours left out in training, for each head.
        skip: add a linear map of each layer's input to its output.

    Raises:
        ValueError: no layers, no heads, or a dropout outside [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        heads: int = 4,
        output_heads: int | None = None,
        attention_dropout: float = 0.0,
        skip: bool = True,
    ) -> None:
        last_heads = heads if output_heads is None else output_heads
        if min(heads, last_heads) < 1:
            raise ValueError(f"{heads} heads and {last_heads} output heads; one or more are needed")
        _demand_share("attention_dropout", attention_dropout)
        widths = _widths(hidden * heads, num_classes, num_layers)
        layers = [
            GATLayer(
                before,
                num_classes if last else hidden,
                last_heads if last else heads,
                concatenate=not last,
                dropout=attention_dropout,
                skip=skip,
            )
            for index, before in enumerate([in_features, *widths[:-1]])
            for last in [index == num_layers - 1]
        ]
        super().__init__(layers, widths, _elu_, dropout=dropout, input_dropout=input_dropout)


def _elu_(x: Tensor) -> Tensor:
    return functional.elu(x, inplace=True)


def _widths(hidden: int, num_classes: int, num_layers: int) -> list[int]:
    if num_layers < 1:
        raise ValueError(f"a model of {num_layers} layers\n\nhint: one or more are needed")
    return [hidden] * (num_layers - 1) + [num_classes]


def _demand_share(name: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"{name} is {share}\n\nhint: it is a share, from 0 to below 1")


def inference(
    model: Model,
    graph: Graph,
    table: FeatureTable,
    device: torch.device | str = "cpu",
    *,
    nodes: Tensor | None = None,
    batch_nodes: int = BATCH_NODES,
    progress: Progress | None = None,
) -> Tensor:
    """Return the logits of nodes with all their neighbours, computed layer by layer.

    The model computes as in evaluation, and is left in the mode it was in. Besides the features
    there is never more in memory than the rows of one layer and those of the next, and, while it
    runs, of a layer that makes rows narrower, their images.

    Args:
        model: on `device`.
        graph: of N nodes.
        table: (N, in_features), on the host or on `device`.
        device: where to compute; the rows of hidden layers stay on the host.
        nodes: (M,) int32 or int64 ids, on the host; all nodes in order if None. Hidden layers are
            computed only for the nodes that these depend on.
        batch_nodes: targets at a time.
        progress: called with (done, total), in nodes of all layers.

    Returns:
        (M, classes) or (N, classes) on the host.

    Raises:
        ValueError: the table does not fit the graph or the model, or a node is not in the graph.
    """
    if table.num_rows != graph.num_nodes:
        raise ValueError(
            f"{table.num_rows} rows of features for a graph of {graph.num_nodes} nodes\n\n"
            "hint: row i is of node i"
        )
    _demand_columns(model, table.num_columns)
    if nodes is not None:
        nodes = demand_seeds(nodes, graph.num_nodes)
    device = torch.device(device)
    needed = _needed(graph, len(model.layers), nodes, batch_nodes)
    total = sum(graph.num_nodes if ids is None else len(ids) for ids in needed[1:])
    done, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            rows, place = table, None
            for index, (sources, targets) in enumerate(pairwise(needed)):
                step = _LayerOfAll(model, index, graph, rows, place, device)
                step.send(sources, batch_nodes)
                count = graph.num_nodes if targets is None else len(targets)
                out = torch.empty(count, model.widths[index], dtype=_dtype(model))
                for begin, end in _ranges(graph, targets, batch_nodes):
                    ids = torch.arange(begin, end) if targets is None else targets[begin:end]
                    out[begin:end] = step.outputs(ids, is_range=targets is None)
                    done += end - begin
                    if progress is not None:
                        progress(done, total)
                # the rows before these may go
                rows, place = FeatureTable(out), _places(targets, graph)
                del step
    finally:
        model.train(was_training)
    return out


class _LayerOfAll:
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
        readable = not table.is_sparse and table.dtype == _dtype(model) and not table.rows.is_cuda
        self.is_direct = device.type == "cpu" and (self.is_mapped or readable)
        self.neighbours = Sampler(graph, [-1])
        # what sources send
        self.sent, self.sent_place = table, place
        self.scores = torch.empty(0, 0)
        self.norms: Tensor | None = None

    def send(self, sources: Tensor | None, batch_nodes: int) -> None:
        """Compute what `sources`, or all nodes, send, as far as it is computed ahead."""
        if not (self.is_mapped or self.is_direct):
            return
        num_rows = self.table.num_rows
        count = self.graph.num_nodes if sources is None else len(sources)
        images = None
        if self.is_mapped:
            num_rows, self.sent_place = count, _places(sources, self.graph)
            columns = self.layer.heads * self.layer.out_features
            images = torch.empty(num_rows, columns, dtype=_dtype(self.model))
        score_columns = self.layer.heads if self.layer.has_scores else 0
        self.scores = torch.empty(num_rows, score_columns, dtype=_dtype(self.model))
        if self.layer.needs_degrees and self.is_direct:
            self.norms = torch.empty(num_rows, dtype=_dtype(self.model))
        for begin in range(0, count, batch_nodes):
            end = min(begin + batch_nodes, count)
            ids = torch.arange(begin, end) if sources is None else sources[begin:end]
            at = ids if self.sent_place is None else self.sent_place[ids].long()
            if self.norms is not None:
                self.norms[at] = _norms(_degrees(self.graph, ids), self.norms.dtype)
            if self.is_mapped or self.layer.has_scores:
                x = self._rows(self.table, self.place, ids)
                if images is not None:
                    images[at] = self.layer.mapped(x).cpu()
                self.scores[at] = self.layer.scores(x).cpu()
        if images is not None:
            self.sent = FeatureTable(images)

    def outputs(self, ids: Tensor, *, is_range: bool) -> Tensor:
        """The rows of nodes `ids` after the layer; `is_range` if they are consecutive numbers."""
        receive = self._receive_direct if self.is_direct else self._receive_gathered
        return self.model.between(self.index, receive(ids, is_range))

    def _receive_direct(self, ids: Tensor, is_range: bool) -> Tensor:
        bounds = slice(int(ids[0]), int(ids[-1]) + 1) if is_range else ids
        indptr, indices = _columns(self.graph, bounds)
        own = ids
        if self.sent_place is not None:
            indices, own = self.sent_place[indices], self.sent_place[ids].long()
        degrees = indptr.diff() if self.layer.needs_degrees else None
        return self.layer.receive(
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
            norms, degrees = _norms(block.in_degrees, rows.dtype), block.in_degrees[: len(ids)]
        hop = Hop(block.indptr, block.indices, None, norms, degrees)
        x_target = self._rows(self.table, self.place, ids)
        scores = self.scores[at].to(self.device)
        return self.layer.receive(hop, rows, scores, x_target, True)

    def _rows(self, table: FeatureTable, place: Tensor | None, ids: Tensor) -> Tensor:
        at = ids if place is None else place[ids]
        reads = self.device.type == "cuda" and not table.is_sparse and table.rows.is_pinned()
        rows = table.gather(at.to(self.device if reads else table.device))
        return rows.to(self.device, _dtype(self.model))


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


def _ranges(graph: Graph, ids: Tensor | None, batch_nodes: int) -> Iterator[tuple[int, int]]:
    """Ranges of `ids`, or of all nodes, of bounded numbers of nodes and of edges."""
    ends = graph.indptr
    if ids is not None:
        ends = functional.pad(_degrees(graph, ids).cumsum(0), (1, 0))
    begin, count = 0, len(ends) - 1
    while begin < count:
        within = int(torch.searchsorted(ends, ends[begin] + BATCH_EDGES, right=True)) - 1
        end = min(max(within, begin + 1), begin + batch_nodes, count)
        yield begin, end
        begin = end


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


def _dtype(model: Model) -> torch.dtype:
    return next(model.parameters()).dtype


def _demand_columns(model: Model, num_columns: int) -> None:
    expected = model.layers[0].in_features
    if num_columns != expected:
        raise ValueError(
            f"features of {num_columns} columns for a model of {expected}\n\n"
            "hint: make the model with in_features equal to the columns of the features"
        )
