"""A stack of layers on heterogeneous blocks, with a projection of each node type's features."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gcnzc.kernels.aggregate.dropout import dropout
from gcnzc.models.autocast import compute_dtype, normalize
from gcnzc.models.hetero.layers import HeteroLayer
from gcnzc.models.layers import random_seed
from gcnzc.models.stack import NORMS, check_probability
from gcnzc.sampling.hetero import HeteroBlock, HeteroMetadata
from gcnzc.system.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_kind,
    describe,
)


class HeteroModel(nn.Module):
    """A stack of layers on heterogeneous blocks, with optional normalization and residuals.

    Each layer computes only the node types that the outputs depend on. Without `output_linear`, the
    last layer computes the outputs: no normalization, activation or dropout follows it.

    Parameters are numbered in the order of the metadata. A state dict is valid only for a model
    with the same metadata.

    Args:
        make_layer: `make_layer(metadata, out_types, out_features)` returns a layer with `hidden`
            input columns; `out_features` is None for a hidden layer, whose output has `hidden`
            columns.
        metadata: node types and edge types, from `HeteroGraph.metadata()` or PyG's
            `HeteroData.metadata()`.
        in_features: columns of the features, or of the trainable embeddings, of each node type.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits, or of the embeddings for link prediction.
        target: the node type whose outputs are computed; or a sequence of node types.
        num_layers: number of layers, and of hops of the sampler.
        activate: `activate(x, p, seed)` returns the activation of `x` with dropout of probability
            p; it may overwrite `x`.
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

    Attributes:
        metadata: node types and edge types.
        targets: names of the node types whose outputs are computed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a node type is unknown or has no `in_features`, a number is below 1, a dropout
            probability is outside [0, 1), or `norm` has an unknown value.
    """

    def __init__(
        self,
        make_layer: Callable[[HeteroMetadata, Sequence[int], int | None], HeteroLayer],
        metadata: Any,
        in_features: Mapping[str, int],
        hidden: int,
        num_classes: int,
        target: str | Sequence[str],
        num_layers: int,
        activate: Callable[[Tensor, float, int], Tensor],
        *,
        dropout: float,
        input_dropout: float,
        input_linear: bool | Collection[str],
        norm: str,
        residual: bool,
        output_linear: bool,
    ) -> None:
        super().__init__()
        self.metadata = as_metadata(metadata)
        self.targets, self.is_single = (
            _check_targets(self.metadata, target),
            isinstance(target, str),
        )
        hidden = check_integer("hidden", hidden, 1)
        self.out_features = num_classes = check_integer("num_classes", num_classes, 1)
        num_layers = check_integer("num_layers", num_layers, 1)
        self.dropout = check_probability("dropout", dropout)
        self.input_dropout = check_probability("input_dropout", input_dropout)
        check_choice("norm", norm, NORMS)
        residual = check_flag("residual", residual)
        output_linear = check_flag("output_linear", output_linear)
        self.activate = activate
        types = _types_of_layers(self.metadata, self.targets, num_layers)
        self.in_types, out_types = types[0], types[1:]
        self.in_features = _check_in_features(self.metadata, in_features, self.in_types)
        self.hidden = hidden
        names = [self.metadata.node_types[t] for t in self.in_types]
        projected = _check_projected(self.metadata, input_linear)
        for name in names:
            if name not in projected and self.in_features[name] != hidden:
                raise ValueError(
                    f"in_features[{name!r}] is {self.in_features[name]}, but hidden is {hidden}, "
                    f"and input_linear omits {name!r}\n\nhint: input_linear=True"
                )
        self.input_linears = nn.ModuleList(
            nn.Linear(self.in_features[name], hidden) if name in projected else nn.Identity()
            for name in names
        )
        num_hidden = num_layers if output_linear else num_layers - 1
        widths = [hidden] * num_hidden + [num_classes] * (num_layers - num_hidden)
        self.layers = nn.ModuleList(
            make_layer(self.metadata, each, None if index < num_hidden else num_classes)
            for index, each in enumerate(out_types)
        )
        self.residuals = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, width) for _ in each)
            for each, width in zip(out_types, widths, strict=True)
            if residual
        )
        norm_class = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm]
        self.norms = nn.ModuleList(
            nn.ModuleList(norm_class(hidden) for _ in each)
            for each in out_types[:num_hidden]
            if norm_class is not None
        )
        self.output_linears = nn.ModuleList(
            nn.Linear(hidden, num_classes) for _ in out_types[-1] if output_linear
        )

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
            TypeError: an argument has the wrong type.
            ValueError: the number of blocks is not the number of layers, blocks have other metadata
                or do not fit together, or a type of `x` is missing or has the wrong number of rows
                or columns.
        """
        if len(blocks) != len(self.layers):
            raise ValueError(f"{len(blocks)} blocks for a model of {len(self.layers)} layers")
        self._check_blocks(blocks)
        return self.project_outputs(self._compute_layers(blocks, x))

    def project_outputs(self, outs: dict[int, Tensor]) -> Tensor | dict[str, Tensor]:
        """Apply the output linear layers, if there are any, and return the result of `forward`.

        Args:
            outs: outputs of the last layer by number of the node type.
        """
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
            TypeError: an argument has the wrong type.
            ValueError: there are no blocks or too many, the layer does not compute the node type,
                or an argument is invalid, see `forward`.
        """
        count = len(blocks)
        if not 1 <= count <= len(self.layers):
            raise ValueError(f"{count} blocks for a model of {len(self.layers)} layers")
        computed = self.layer_types(count)
        if node_type not in computed:
            raise ValueError(f"layer {count} does not compute node type {node_type!r:.100}")
        self._check_blocks(blocks)
        return self._compute_layers(blocks, x)[self.metadata.node_types.index(node_type)]

    def layer_types(self, layer: int) -> list[str]:
        """Return the names of the node types that a layer computes.

        Args:
            layer: number of the layer, from 1.
        """
        computed = cast(HeteroLayer, self.layers[layer - 1]).out_types
        return [self.metadata.node_types[t] for t in computed]

    def _compute_layers(
        self, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Return the outputs of layer `len(blocks)`, before the output linear layers."""
        rows, outs = self._project_features(blocks[0], x), {}
        for index, (module, block) in enumerate(zip(self.layers, blocks, strict=False)):
            outs = module(block, rows)
            if self.residuals:
                self.add_residuals(index, outs, block.destination_rows(rows))
            if index == len(self.layers) - 1 and not self.output_linears:
                return outs
            if self.norms:
                for t, norm in zip(outs, self.norms[index], strict=True):  # type: ignore[call-overload]
                    # batch normalization has no statistics of no rows
                    outs[t] = normalize(norm, outs[t]) if len(outs[t]) else outs[t]
            rows = self._activate(self._concatenate(block, outs))
        parts = rows.split(list(blocks[-1].num_dst))
        return {t: parts[t] for t in outs}

    def add_residuals(
        self, index: int, outs: dict[int, Tensor], own: Sequence[Tensor] | Mapping[int, Tensor]
    ) -> None:
        """Add the residuals of a layer to its outputs, in place.

        Args:
            index: of the layer, from 0.
            outs: outputs by number of the node type.
            own: rows of the destinations by number of the node type.
        """
        for t, linear in zip(outs, self.residuals[index], strict=True):  # type: ignore[call-overload]
            outs[t] = linear(own[t]).add_(outs[t])

    def _activate(self, rows: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        return self.activate(rows, p, random_seed() if p else 0)

    def _concatenate(self, block: HeteroBlock, outs: Mapping[int, Tensor]) -> Tensor:
        """Return the rows of all node types; those of types that were not computed are zeros."""
        like = next(iter(outs.values()))
        return torch.cat(
            [
                outs[t] if t in outs else like.new_zeros(count, like.shape[1])
                for t, count in enumerate(block.num_dst)
            ]
        )

    def _project_features(self, block: HeteroBlock, x: Mapping[str, Tensor]) -> Tensor:
        """Return the (sum of S_t, hidden) projected features of all sources."""
        check_kind("x", x, Mapping, "{node type: features}, a dict")
        weight = next(self.parameters())
        dtype = compute_dtype(weight.dtype, block.device)
        parts = []
        linears = dict(zip(self.in_types, self.input_linears, strict=True))
        for t, (name, count) in enumerate(
            zip(self.metadata.node_types, block.num_src, strict=True)
        ):
            if t not in linears:
                parts.append(torch.zeros(count, self.hidden, dtype=dtype, device=block.device))
                continue
            features = x.get(name)
            if features is None and not count:
                features = torch.empty(0, self.in_features[name], device=block.device)
            self._check_features(name, features, count)
            assert features is not None
            features = features.to(dtype)
            if self.training and self.input_dropout:
                features = dropout(features, self.input_dropout, random_seed())
            parts.append(linears[t](features))
        rows = torch.cat(parts)
        if self.training and self.dropout:
            rows = dropout(rows, self.dropout, random_seed())
        return rows

    def _check_features(self, name: str, features: object, count: int) -> None:
        if features is None:
            raise ValueError(
                f"x has no features of node type {name!r}, which has {count} nodes\n\n"
                "hint: for types without features, pass rows of a trainable embedding"
            )
        if not isinstance(features, Tensor) or features.is_complex():
            raise TypeError(f"x[{name!r}] is {describe(features)}, not real numbers")
        expected = (count, self.in_features[name])
        if features.shape != expected:
            raise ValueError(
                f"x[{name!r}] has shape {tuple(features.shape)}, but the first block and the model "
                f"have {expected}"
            )

    def _check_blocks(self, blocks: Sequence[HeteroBlock]) -> None:
        for index, block in enumerate(blocks):
            check_kind(f"blocks[{index}]", block, HeteroBlock, "build_hetero_blocks(batch)")
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
    hint = "graph.metadata(): a list of names, and a list of triples of names"
    try:
        node_types, edge_types = metadata
        found = HeteroMetadata(tuple(node_types), tuple(tuple(each) for each in edge_types))
    except (TypeError, ValueError):
        raise TypeError(f"metadata is {describe(metadata)}\n\nhint: {hint}") from None
    for each in found.edge_types:
        if len(each) != 3 or each[0] not in found.node_types or each[2] not in found.node_types:
            raise ValueError(
                f"metadata has the edge type {each}, whose node types are not in "
                f"{list(found.node_types)}\n\nhint: {hint}"
            )
    for kind in (found.node_types, found.edge_types):
        if len(set(kind)) != len(kind):
            raise ValueError(f"metadata has a type twice: {list(kind)}\n\nhint: {hint}")
    return found


def _check_targets(metadata: HeteroMetadata, target: str | Sequence[str]) -> tuple[str, ...]:
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets:
        raise ValueError("target has no node types\n\nhint: target='paper'")
    for name in targets:
        if name not in metadata.node_types:
            raise ValueError(
                f"target is {name!r:.100}, but the node types are {list(metadata.node_types)}"
            )
    return tuple(dict.fromkeys(targets))


def _check_projected(metadata: HeteroMetadata, given: bool | Collection[str]) -> set[str]:
    """Return the node types whose features are projected."""
    if isinstance(given, bool):
        return set(metadata.node_types) if given else set()
    if isinstance(given, str) or not isinstance(given, Collection):
        raise TypeError(f"input_linear is {describe(given)}, not True, False or node types")
    for name in given:
        if name not in metadata.node_types:
            raise ValueError(
                f"input_linear has the node type {name!r:.100}, but the node types are "
                f"{list(metadata.node_types)}"
            )
    return set(given)


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


def _check_in_features(
    metadata: HeteroMetadata, in_features: Mapping[str, int], needed: Iterable[int]
) -> dict[str, int]:
    check_kind("in_features", in_features, Mapping, "{node type: columns of its features}, a dict")
    for name in in_features:
        if name not in metadata.node_types:
            raise ValueError(
                f"in_features has the node type {name!r:.100}, but the node types are "
                f"{list(metadata.node_types)}"
            )
    for t in needed:
        name = metadata.node_types[t]
        if name not in in_features:
            raise ValueError(
                f"in_features has no columns of node type {name!r}\n\n"
                "hint: for a type without features, the columns of its trainable embedding"
            )
    return {
        name: check_integer(f"in_features[{name!r}]", columns, 1)
        for name, columns in in_features.items()
    }
