"""Fragments: parts of the parameters that are exchanged at different steps.

Every element lies in one fragment. A fragment is so many elements of the vector of all parameters,
or whole parameters chosen by their names.

Letters: P fragments, n elements of all parameters, m of a fragment.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from gcnzc.optim.flat import Segment
from gcnzc.optim.flat_parameters import FlatParameters


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements `begin` to `end` of a parameter, as it lies flat."""

    parameter: nn.Parameter
    begin: int
    end: int


class Fragment:
    """Pieces of parameters, one after the other as a vector (m,).

    Args:
        name: for messages.
        pieces: of several parameters, or of one.
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
        # what does not lie flat is copied on the way
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
    space: FlatParameters,
    wanted: int | str | Sequence[str],
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> list[Fragment]:
    """The fragments of all parameters, each element in one.

    Args:
        space: where the parameters lie in the vector.
        wanted: how many, of as many elements each as can be; or "modules", one for each submodule
            of the model, and for each member of lists of them; or regular expressions, one for the
            parameters whose names each is the first to match, and one for what is left.
        named_parameters: of the model; for names.

    Raises:
        ValueError: there are no such fragments.
    """
    if isinstance(wanted, int):
        return _slices(space, wanted)
    if isinstance(wanted, str) and wanted != "modules":
        raise ValueError(
            f"fragments {wanted!r}\n\nhint: a number, 'modules', or a list of regular expressions"
        )
    named = _named(space, named_parameters)
    if isinstance(wanted, str):
        keys = [_module_of(name) for name, _ in named]
        order = list(dict.fromkeys(keys))
    else:
        keys = [_first_match(name, wanted) for name, _ in named]
        for pattern in wanted:
            if pattern not in keys:
                raise ValueError(
                    f"no parameter for the fragment {pattern!r}\n\nhint: a parameter lies in the "
                    "fragment of the first expression that is found in its name: "
                    f"{', '.join(name for name, _ in named)}"
                )
        order = [key for key in [*dict.fromkeys(wanted), ""] if key in keys]
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


def _slices(space: FlatParameters, count: int) -> list[Fragment]:
    total = space.num_elements
    if not 1 <= count <= total:
        raise ValueError(f"{count} fragments of {total:,} elements\n\nhint: from 1 to that number")
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
                for segment in space.segments
                if max(begin, segment.begin) < min(end, segment.end)
            ],
        )
        for number, (begin, end) in enumerate(pairwise(bounds))
    ]


def _named(
    space: FlatParameters, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, Segment]]:
    """Segments with the names that the model gives them."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters or ():
        # a tied one has several: the first
        names.setdefault(id(parameter), name)
    for segment in space.segments:
        if id(segment.parameter) not in names:
            raise ValueError(
                f"no name for {segment.name} of the optimizer\n\nhint: fragments by name need "
                "named_parameters=model.named_parameters()"
            )
    return [(names[id(segment.parameter)], segment) for segment in space.segments]


def _module_of(name: str) -> str:
    """`layers.0` of `layers.0.weight`, `head` of `head.first.bias`."""
    words = name.split(".")[:-1]
    return (
        ".".join(words[:2] if len(words) > 1 and words[1].isdigit() else words[:1]) or "the model"
    )


def _first_match(name: str, patterns: Sequence[str]) -> str:
    return next((pattern for pattern in patterns if re.search(pattern, name)), "")
