"""A stack of layers on heterogeneous blocks, with a projection of each node type's features."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gcnzc.models.autocast import compute_dtype, normalize
from gcnzc.models.hetero.layers import HeteroLayer
from gcnzc.models.layer_edges import TypedEdges
from gcnzc.models.stack import NORMS, Stack
from gcnzc.sampling.hetero import HeteroBlock, HeteroMetadata
from gcnzc.system.arguments import check_flag, check_integer, check_kind, describe


class HeteroModel(Stack):
    """A stack of layers on heterogeneous blocks, with optional normalization and residuals.

    Each layer computes only the node types that the outputs depend on. Without `output_linear`, the
    last layer computes the outputs: no normalization, activation or dropout follows it.

    Parameters are numbered in the order of the metadata. A state dict is valid only for a model
    with the same metadata.

    A subclass sets `layer_class`, or overrides `make_layer`.

    Args:
        metadata: node types and edge types, from `Graph.metadata()` or PyG's
            `HeteroData.metadata()`.
        in_features: columns of the features, or of the trainable embeddings, of each node type.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits, or of the embeddings for link prediction.
        target: the node type whose outputs are computed; or a sequence of node types.
        num_layers: number of layers, and of hops of the sampler.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        input_linear: project the features of all node types to `hidden` columns; or the node types
            whose features are projected. The others, such as trainable embeddings, must have
            `hidden` columns.
        norm: "batch" or "layer" for normalization after each hidden layer, with parameters for each
            node type; or "none".
        residual: add a linear projection of each layer's input to its output, for each node type.
        output_linear: compute the outputs with a linear projection after the last layer, which is
            then a hidden layer.
        activation: "relu" or "elu".
        layer_options: passed to `make_layer`.

    Attributes:
        metadata: node types and edge types.
        targets: names of the node types whose outputs are computed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a node type is unknown or has no `in_features`, a number is below 1, a dropout
            probability is outside [0, 1), or `norm` or `activation` has an unknown value.
    """

    layer_class: type[HeteroLayer]

    def __init__(
        self,
        metadata: Any,
        in_features: Mapping[str, int],
        hidden: int,
        num_classes: int,
        target: str | Sequence[str],
        num_layers: int = 2,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        input_linear: bool | Collection[str] = True,
        norm: str = "none",
        residual: bool = False,
        output_linear: bool = False,
        activation: str = "relu",
        **layer_options: Any,
    ) -> None:
        super().__init__(
            num_classes, num_layers, dropout, input_dropout, norm, activation, output_linear
        )
        self.metadata, self.hidden = as_metadata(metadata), check_integer("hidden", hidden, 1)
        residual, node_types = check_flag("residual", residual), self.metadata.node_types
        self.is_single = isinstance(target, str)
        self.targets = (target,) if isinstance(target, str) else tuple(dict.fromkeys(target))
        if not self.targets:
            raise ValueError("target has no node types\n\nhint: target='paper'")
        _check_types("target", self.targets, node_types)
        check_kind("in_features", in_features, Mapping, "{node type: columns of its features}")
        _check_types("in_features", in_features, node_types)
        self.in_features = {
            name: check_integer(f"in_features[{name!r}]", columns, 1)
            for name, columns in in_features.items()
        }
        types = _types_of_layers(self.metadata, self.targets, self.num_layers)
        self.in_types, out_types = types[0], types[1:]
        # by number of the node type; for a bool, all or none
        is_projected = [input_linear is True] * len(node_types)
        if not isinstance(input_linear, bool):
            check_kind("input_linear", input_linear, (list, tuple, set, frozenset))
            _check_types("input_linear", input_linear, node_types)
            is_projected = [name in input_linear for name in node_types]
        self.input_linears = nn.ModuleList()
        for t in self.in_types:
            name, columns = node_types[t], self.in_features.get(node_types[t])
            if columns is None:
                raise ValueError(
                    f"in_features has no columns of node type {name!r}\n\n"
                    "hint: for a type without features, the columns of its trainable embedding"
                )
            if not is_projected[t] and columns != self.hidden:
                raise ValueError(
                    f"in_features[{name!r}] is {columns}, but hidden is {self.hidden}, and "
                    f"input_linear omits {name!r}\n\nhint: input_linear=True"
                )
            linear = nn.Linear(columns, self.hidden) if is_projected[t] else nn.Identity()
            self.input_linears.append(linear)
        widths = [
            self.hidden if index < self.num_hidden else self.out_features
            for index in range(self.num_layers)
        ]
        self.layers = nn.ModuleList(
            self.make_layer(each, width, index < self.num_hidden, **layer_options)
            for index, (each, width) in enumerate(zip(out_types, widths, strict=True))
        )
        self.residuals = nn.ModuleList(
            nn.ModuleList(nn.Linear(self.hidden, width) for _ in each)
            for each, width in zip(out_types, widths, strict=True)
            if residual
        )
        norm_class = NORMS[norm]
        self.norms = nn.ModuleList(
            nn.ModuleList(norm_class(self.hidden) for _ in each)
            for each in out_types[: self.num_hidden]
            if norm_class
        )
        self.output_linears = nn.ModuleList(
            nn.Linear(self.hidden, self.out_features) for _ in out_types[-1] if output_linear
        )

    def make_layer(
        self, out_types: Sequence[int], out_features: int, is_hidden: bool, **options: Any
    ) -> HeteroLayer:
        """Return a layer with `hidden` input columns.

        Args:
            out_types: see `HeteroLayer`.
            out_features: columns of the output: `hidden`, or those of the outputs of the model.
            is_hidden: whether the output is hidden.
            options: `layer_options` of the model.
        """
        return self.layer_class(self.metadata, out_types, self.hidden, out_features, **options)

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def forward(
        self, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Return the outputs of the seeds.

        Args:
            blocks: one per layer, input layer first, from `build_hetero_blocks` or
                `build_full_hetero_blocks`.
            x: for each node type (S_t, in_features[t]) features of the sources of the first block,
                in the order of `HeteroBatch.nodes`, on the device of the blocks; of any real dtype,
                integers too, converted to that of the model. Rows of trainable embeddings may
                require gradients. Types without sources may be missing.

        Returns:
            (seeds, num_classes) outputs for the nodes of the target type that are destinations of
            the last block; if `target` is a sequence, a dict of outputs by node type.

        Raises:
            TypeError: `x` is not a dict.
            ValueError: the number of blocks is not the number of layers, blocks have other metadata
                or do not fit together, or a type of `x` is missing or has the wrong number of rows
                or columns.
        """
        self._check_blocks(blocks, len(self.layers))
        return self.compute(list(map(TypedEdges, blocks)), x)

    def compute(
        self, edges: Sequence[TypedEdges], x: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Return the result of `forward`, given the edges of the blocks."""
        outs = self._compute_layers(edges, x)
        if self.output_linears:
            linears = zip(outs, self.output_linears, strict=True)
            outs = {t: linear(outs[t]) for t, linear in linears}
        numbers = [self.metadata.node_types.index(name) for name in self.targets]
        if self.is_single:
            return outs[numbers[0]]
        return {name: outs[t] for name, t in zip(self.targets, numbers, strict=True)}

    def layer_outputs(
        self, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor], node_type: str
    ) -> Tensor:
        """Return the outputs of a layer for the seeds of a node type.

        Args:
            blocks: one for each of the first layers up to that whose outputs are returned.
            x: features, see `forward`.
            node_type: one of `layer_types` of this layer.

        Returns:
            (seeds, columns) outputs as the next layer receives them: after normalization and
            activation, unless the layer computes the outputs of the model.

        Raises:
            TypeError: `x` is not a dict.
            ValueError: there are no blocks or too many, the layer does not compute the node type,
                or an argument is invalid, see `forward`.
        """
        self._check_blocks(blocks, 1)
        if node_type not in self.layer_types(len(blocks)):
            raise ValueError(f"layer {len(blocks)} does not compute node type {node_type!r:.100}")
        outs = self._compute_layers(list(map(TypedEdges, blocks)), x)
        return outs[self.metadata.node_types.index(node_type)]

    def layer_types(self, layer: int) -> list[str]:
        """Return the names of the node types that a layer computes.

        Args:
            layer: number of the layer, from 1.
        """
        computed = cast(HeteroLayer, self.layers[layer - 1]).out_types
        return [self.metadata.node_types[t] for t in computed]

    def _compute_layers(
        self, edges: Sequence[TypedEdges], x: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Return the outputs of layer `len(edges)`, before the output linear layers."""
        rows, outs = self._project_features(edges[0].block, x), {}
        for index, (layer, own) in enumerate(zip(self.layers, edges, strict=False)):
            block, outs = own.block, layer(own, rows)
            if self.residuals:
                own_rows = block.destination_rows(rows)
                for t, linear in zip(outs, self.residuals[index], strict=True):  # type: ignore[call-overload]
                    outs[t] = linear(own_rows[t]).add_(outs[t])
            if index == len(self.layers) - 1 and not self.output_linears:
                return outs
            if self.norms:
                for t, norm in zip(outs, self.norms[index], strict=True):  # type: ignore[call-overload]
                    outs[t] = normalize(norm, outs[t])
            # the rows of types that were not computed are zeros
            like = next(iter(outs.values()))
            parts = [
                outs[t] if t in outs else like.new_zeros(count, like.shape[1])
                for t, count in enumerate(block.num_dst)
            ]
            rows = self._activate(torch.cat(parts))
        found = rows.split(list(edges[-1].block.num_dst))
        return {t: found[t] for t in outs}

    def _project_features(self, block: HeteroBlock, x: Mapping[str, Tensor]) -> Tensor:
        """Return the (sum of S_t, hidden) projected features of all sources."""
        check_kind("x", x, Mapping, "{node type: features}, a dict")
        options: dict[str, Any] = {
            "dtype": compute_dtype(next(self.parameters()).dtype, block.device),
            "device": block.device,
        }
        parts = []
        linears = dict(zip(self.in_types, self.input_linears, strict=True))
        for t, (name, count) in enumerate(
            zip(self.metadata.node_types, block.num_src, strict=True)
        ):
            if t not in linears:
                parts.append(torch.zeros(count, self.hidden, **options))
                continue
            features = x.get(name)
            if features is None:
                if count:
                    raise ValueError(
                        f"x has no features of node type {name!r}, which has {count} nodes\n\n"
                        "hint: for types without features, pass rows of a trainable embedding"
                    )
                features = torch.empty(0, self.in_features[name], **options)
            expected = (count, self.in_features[name])
            if features.shape != expected:
                raise ValueError(
                    f"x[{name!r}] has shape {tuple(features.shape)}, but the first block and the "
                    f"model have {expected}"
                )
            features = features.to(options["dtype"])
            parts.append(linears[t](self._drop(features, self.input_dropout)))
        return self._drop(torch.cat(parts), self.dropout)

    def _check_blocks(self, blocks: Sequence[HeteroBlock], least: int) -> None:
        if not least <= len(blocks) <= len(self.layers):
            raise ValueError(f"{len(blocks)} blocks for a model of {len(self.layers)} layers")
        for index, block in enumerate(blocks):
            if block.metadata != self.metadata:
                raise ValueError(
                    f"blocks[{index}] has other metadata than the model: {block.metadata}; the "
                    f"model has {self.metadata}"
                )
            if index and block.num_src != blocks[index - 1].num_dst:
                raise ValueError(
                    f"blocks[{index}] has {block.num_src} sources, but blocks[{index - 1}] has "
                    f"{blocks[index - 1].num_dst} destinations"
                )


def as_metadata(metadata: Any) -> HeteroMetadata:
    """Return a pair of node types and edge types as `HeteroMetadata`.

    Raises:
        TypeError: it is not such a pair.
        ValueError: an edge type has an unknown node type, or a type is given twice.
    """
    if isinstance(metadata, HeteroMetadata):
        return metadata
    try:
        node_types, edge_types = metadata
        found = HeteroMetadata(tuple(node_types), tuple((s, r, d) for s, r, d in edge_types))
    except (TypeError, ValueError):
        hint = "graph.metadata(): a list of names, and a list of triples of names"
        raise TypeError(f"metadata is {describe(metadata)}\n\nhint: {hint}") from None
    ends = [end for each in found.edge_types for end in each[::2]]
    _check_types("an edge type of metadata", ends, found.node_types)
    for kind in (found.node_types, found.edge_types):
        if len(set(kind)) != len(kind):
            raise ValueError(f"metadata has a type twice: {list(kind)}")
    return found


def _check_types(name: str, given: Iterable[str], node_types: Sequence[str]) -> None:
    for each in given:
        if each not in node_types:
            raise ValueError(
                f"{name} has the node type {each!r:.100}, but the node types are {list(node_types)}"
            )


def _types_of_layers(
    metadata: HeteroMetadata, targets: Iterable[str], num_layers: int
) -> list[list[int]]:
    """Return the node types that are read by each layer, and in the end the targets, in order."""
    needed = {metadata.node_types.index(name) for name in targets}
    found = [sorted(needed)]
    for _ in range(num_layers):
        needed = needed | {
            metadata.node_types.index(metadata.edge_types[r][0])
            for t in needed
            for r in metadata.edge_types_in[t]
        }
        found.append(sorted(needed))
    return found[::-1]
