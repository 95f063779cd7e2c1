"""Split the parameters into fragments that are synchronized at different steps.

Each element is in exactly one fragment. A fragment is a range of the flat vector of all parameters,
or a set of whole parameters that is selected by name.

Notation: P fragments, n elements of all parameters, m of a fragment.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from gcnzc.optim.flat_parameters import FlatParameters, Segment


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements `begin` to `end` (exclusive) of a flattened parameter."""

    parameter: nn.Parameter
    begin: int
    end: int


class Fragment:
    """Pieces of parameters, concatenated to a vector (m,).

    Args:
        name: the name in error messages.
        pieces: the pieces, in the order of the vector.
    """

    def __init__(self, name: str, pieces: Sequence[Piece]) -> None:
        self.name, self.pieces = name, list(pieces)
        self.num_elements = sum(piece.end - piece.begin for piece in pieces)

    def _views(self, values: Tensor) -> list[Tensor]:
        sizes = [piece.end - piece.begin for piece in self.pieces]
        return list(values[: self.num_elements].split(sizes))

    @torch.no_grad()
    def read(self, out: Tensor) -> Tensor:
        """Copy the parameters into the first m elements of `out`, and return it."""
        # reshape copies parameters that are not contiguous
        flat = [each.parameter.reshape(-1)[each.begin : each.end] for each in self.pieces]
        torch._foreach_copy_(self._views(out), flat)
        return out

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Copy the first m elements of a vector into the parameters."""
        for piece, view in zip(self.pieces, self._views(values), strict=True):
            parameter = piece.parameter
            flat = parameter.reshape(-1)
            flat[piece.begin : piece.end] = view
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))


def split_into_fragments(
    flat_params: FlatParameters,
    requested: int | str | Sequence[str],
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> list[Fragment]:
    """Split the parameters into fragments; each element is in exactly one.

    Args:
        flat_params: the layout of the parameters.
        requested: the number of fragments, of nearly equal sizes; or "modules" for one fragment
            for each submodule of the model, and for each member of its module lists; or regular
            expressions. Each expression selects the parameters whose names it is the first to
            match; parameters that match none are one more fragment.
        named_parameters: the model's `named_parameters()`; required for fragments by name.

    Raises:
        ValueError: the number is out of range, an expression selects no parameter, or a parameter
            has no name.
    """
    if isinstance(requested, int):
        return _slices(flat_params, requested)
    if requested != "modules" and not _are_expressions(requested):
        raise ValueError(
            f"fragments is {requested!r}\n\nhint: give a number, 'modules', or a list of regular "
            "expressions"
        )
    named = _named(flat_params, named_parameters)
    if isinstance(requested, str):
        keys = [_module_of(name) for name, _ in named]
        order = list(dict.fromkeys(keys))
    else:
        keys = [_first_match(name, requested) for name, _ in named]
        for pattern in requested:
            if pattern not in keys:
                raise ValueError(
                    f"no parameter for the fragment {pattern!r}\n\nhint: a parameter is in the "
                    "fragment of the first expression that is found in its name; the names are "
                    f"{', '.join(name for name, _ in named)}"
                )
        order = [key for key in [*dict.fromkeys(requested), ""] if key in keys]
    return [
        Fragment(
            order_key or "the rest",
            [
                Piece(segment.parameter, 0, segment.end - segment.begin)
                for key, (_, segment) in zip(keys, named, strict=True)
                if key == order_key
            ],
        )
        for order_key in order
    ]


def _are_expressions(requested: object) -> bool:
    """Whether a value is a list of at least one valid regular expression."""
    if isinstance(requested, str) or not isinstance(requested, Sequence) or not requested:
        return False
    try:
        return all(re.compile(each) for each in requested)
    except (re.error, TypeError):
        return False


def _slices(flat_params: FlatParameters, count: int) -> list[Fragment]:
    total = flat_params.num_elements
    if not 1 <= count <= total:
        raise ValueError(
            f"{count} fragments of {total:,} elements\n\nhint: give a number from 1 to {total}"
        )
    bounds = [total * number // count for number in range(count + 1)]
    return [
        Fragment(
            f"slice {number} of {count}",
            [
                Piece(
                    segment.parameter,
                    max(begin, segment.begin) - segment.begin,
                    min(end, segment.end) - segment.begin,
                )
                for segment in flat_params.segments
                if max(begin, segment.begin) < min(end, segment.end)
            ],
        )
        for number, (begin, end) in enumerate(pairwise(bounds))
    ]


def _named(
    flat_params: FlatParameters, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, Segment]]:
    """Return the segments with the names of their parameters in the model."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters or ():
        # a tied parameter has several names
        names.setdefault(id(parameter), name)
    for segment in flat_params.segments:
        if id(segment.parameter) not in names:
            raise ValueError(
                f"no name for {segment.name} of the optimizer\n\nhint: for fragments by name, give "
                "named_parameters=model.named_parameters()"
            )
    return [(names[id(segment.parameter)], segment) for segment in flat_params.segments]


def _module_of(name: str) -> str:
    """Return the module of a parameter's name, such as `layers.0` for `layers.0.weight`.

    For `head.first.bias` it is `head`.
    """
    words = name.split(".")[:-1]
    return (
        ".".join(words[:2] if len(words) > 1 and words[1].isdigit() else words[:1]) or "the model"
    )


def _first_match(name: str, patterns: Sequence[str]) -> str:
    return next((pattern for pattern in patterns if re.search(pattern, name)), "")
