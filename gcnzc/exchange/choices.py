"""The choice of a collective algorithm for each request, and the bytes that each one sends.

The answer of a request does not depend on the algorithm, except for the order of additions in sums.
`builtin` is the process group's own collective; simulations use the algorithm that gloo uses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import collectives
from gcnzc.exchange.algorithms import (
    ALGORITHMS,
    BUILTIN,
    CHAIN,
    DEFAULT,
    LIKE_GLOO,
    default_algorithm,
)
from gcnzc.exchange.requests import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Collective,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
    num_bytes_of,
)

Steps = tuple[tuple[int | None, str], ...]

# a started request is executed by a thread that shares the GIL with the training thread. The
# messages of gcnzc's algorithms need it, so that on busy cores larger sums than this one, and all
# gathers, cost more time than these algorithms save
BACKGROUND_BYTES = 16 * 1024
_IN_BACKGROUND: dict[str, Steps] = {
    "Sum": ((BACKGROUND_BYTES, DEFAULT), (None, BUILTIN)),
    "AllGather": ((None, BUILTIN),),
    "AllToAll": ((None, BUILTIN),),
}


@dataclass(frozen=True)
class Choices:
    """The collective algorithm for each kind and size of request.

    Raises:
        ValueError: an algorithm does not exist, or the steps of a kind do not cover all sizes.
    """

    steps: Mapping[str, Steps] = field(default_factory=dict)
    """by kind, pairs (largest size in bytes, name of the algorithm), ascending; the last size is
    None, for no limit. The name "default", and kinds that are missing, select the default algorithm
    for the size and the number of ranks, by `default_algorithm`"""

    def __post_init__(self) -> None:
        for kind, steps in self.steps.items():
            for _, name in steps:
                _check_known(kind, name)
            limits = [math.inf if limit is None else limit for limit, _ in steps]
            if limits != sorted(set(limits)) or limits[-1:] != [math.inf]:
                raise ValueError(
                    f"{kind}: steps {tuple(steps)} do not cover all sizes\n\n"
                    "hint: sort the steps by size, and end with None"
                )
            # ranks may send parts of different sizes, and would choose different algorithms
            if kind == "AllToAll" and len(steps) > 1:
                raise ValueError(
                    f"AllToAll: steps {tuple(steps)} depend on the size\n\n"
                    "hint: use one algorithm for all sizes, since each rank knows only its own"
                )

    def find(self, request: Collective, world_size: int) -> str:
        """Return the name of the algorithm for a request of that many ranks."""
        kind = kind_of(request)
        steps = self.steps.get(kind)
        if steps is not None and len(steps) == 1 and steps[0][1] != DEFAULT:
            return steps[0][1]
        return self.find_for_size(kind, num_bytes_of(request), world_size)

    def find_for_size(self, kind: str, num_bytes: int, world_size: int) -> str:
        """Return the name of the algorithm for requests of a kind and a size in bytes."""
        name = self.name_in_steps(kind, num_bytes)
        return default_algorithm(kind, num_bytes, world_size) if name == DEFAULT else name

    def name_in_steps(self, kind: str, num_bytes: int) -> str:
        """Return the name in `steps` for a kind and a size in bytes, which may be "default"."""
        steps = self.steps.get(kind, ((None, DEFAULT),))
        return next(name for limit, name in steps if limit is None or num_bytes <= limit)

    @cached_property
    def in_background(self) -> "Choices":
        """The choices for started requests, which another thread executes."""
        sums = self.steps.get("Sum", _IN_BACKGROUND["Sum"])
        return Choices({**self.steps, **_IN_BACKGROUND, "Sum": sums})

    @classmethod
    def always(cls, **names: str) -> "Choices":
        """Create choices with one algorithm for all sizes of some kinds, as `always(Sum="ring")`.

        Other kinds have the default algorithms.

        Raises:
            ValueError: there is no such algorithm for that kind.
        """
        return cls().replace(**names)

    def replace(self, **names: str) -> "Choices":
        """Return a copy with one algorithm for all sizes of some kinds; see `always`."""
        return Choices({**self.steps, **{kind: ((None, name),) for kind, name in names.items()}})


def _check_known(kind: str, name: str) -> None:
    if name == DEFAULT and kind in ALGORITHMS:
        return
    plain, colon, piece = name.partition(":")
    fits = not colon or (plain == CHAIN and piece.isdecimal() and int(piece) > 0)
    if plain not in ALGORITHMS.get(kind, ()) or not fits:
        known = ", ".join(ALGORITHMS.get(kind, ALGORITHMS))
        raise ValueError(f"no algorithm {name!r} for {kind}\n\nhint: use one of {known}")


def kind_of(request: Collective) -> str:
    """Return the kind of a request in `ALGORITHMS`; a mean is a kind of sum."""
    return "Sum" if isinstance(request, Mean) else type(request).__name__


def expand(request: Collective, rank: int, world_size: int, name: str) -> Algorithm[Any]:
    """Execute a collective by point-to-point messages, and return its answer.

    Args:
        request: the collective, with tensors on the host; `check_request` accepts it.
        rank: this rank.
        world_size: the number of ranks.
        name: the name of the algorithm.
    """
    if name == BUILTIN:
        name = LIKE_GLOO[kind_of(request)]
    name, _, piece = name.partition(":")
    if isinstance(request, Sum | Mean):
        all_reduce = getattr(collectives, f"{name}_sum")
        yield from all_reduce(request.values.view(-1), rank, world_size)
        return finish_sum(request, world_size)
    if isinstance(request, AllGather):
        gather = getattr(collectives, f"{name}_gather")
        rows = yield from gather(as_bytes(request.values), rank, world_size)
        return rows.view(-1).view(request.values.dtype).view(world_size, *request.values.shape)
    if isinstance(request, AllGatherScalar):
        value = scalar_tensor(request)
        rows = yield from collectives.doubling_gather(value, rank, world_size)
        return tuple(rows[:, 0].tolist())
    if isinstance(request, ReduceScatter):
        return (yield from collectives.direct_scatter(request.values, rank, world_size))
    if isinstance(request, Broadcast):
        flat = as_bytes(request.values)
        if name == CHAIN:
            piece_bytes = int(piece or collectives.PIECE_BYTES)
            yield from collectives.chain(flat, request.root, rank, world_size, piece_bytes)
        else:
            yield from collectives.binomial(flat, request.root, rank, world_size)
        return copy_back(request.values, flat)
    if isinstance(request, SendReceive):
        flat = yield from collectives.send_receive(as_bytes(request.values), request.peer, rank)
        return flat.view(request.values.dtype).view(request.values.shape)
    counts = request.counts
    if counts is None:
        lengths = [torch.tensor([len(part)]) for part in request.parts]
        received = yield from collectives.direct_exchange(lengths, [1] * world_size, rank)
        counts = [int(count) for count in received]
    dtype, size = request.parts[0].dtype, request.parts[0].element_size()
    if dtype == torch.uint8:
        return (yield from collectives.direct_exchange(request.parts, counts, rank))
    parts = yield from collectives.direct_exchange(
        [as_bytes(part) for part in request.parts], [count * size for count in counts], rank
    )
    return [part.view(dtype) for part in parts]


def sent_bytes(request: Collective, rank: int, world_size: int, name: str) -> float:
    """Return the bytes that a rank sends for a request, by the formula of its algorithm.

    The formula is exact if the number of elements is a multiple of the number of ranks and, for
    sums by halving, the number of ranks is a power of two. For `builtin` it is that of gloo's
    algorithms.
    """
    size, world = num_bytes_of(request), world_size
    if name == BUILTIN:
        name = LIKE_GLOO[kind_of(request)]
    if isinstance(request, Sum | Mean):
        if name == "ring":
            return 2 * (world - 1) / world * size
        rounds = world.bit_length() - 1
        power = 1 << rounds
        pairs = world - power
        if rank < 2 * pairs and rank % 2:
            return size
        own = rounds * size if name == "doubling" else 2 * (power - 1) / power * size
        return own + (size if rank < 2 * pairs else 0)
    if isinstance(request, AllGather | AllGatherScalar):
        return (world - 1) * size
    if isinstance(request, ReduceScatter):
        return (world - 1) / world * size
    if isinstance(request, SendReceive):
        return 0 if request.peer == rank else size
    if isinstance(request, Broadcast):
        position = (rank - request.root) % world
        if name.startswith(CHAIN):
            return size if position < world - 1 else 0
        step = 1
        while step < world and not position & step:
            step *= 2
        return size * sum(position + (1 << b) < world for b in range(step.bit_length() - 1))
    own = request.parts[rank].numel() * request.parts[rank].element_size()
    return size - own + (8 * (world - 1) if request.counts is None else 0)


def check_request(request: Collective, world_size: int) -> None:
    """Check a request.

    Raises:
        ValueError: it is invalid, or does not match the number of ranks.
    """
    if isinstance(request, AllToAll):
        if len(request.parts) != world_size:
            raise ValueError(
                f"AllToAll: {len(request.parts)} parts for {world_size} ranks\n\n"
                "hint: give one part per rank, which may be empty"
            )
        if len({part.dtype for part in request.parts}) > 1:
            raise ValueError(
                "AllToAll: parts of several dtypes\n\nhint: send bytes with .view(torch.uint8)"
            )
        return
    if isinstance(request, AllGatherScalar):
        return
    if isinstance(request, Broadcast):
        if not 0 <= request.root < world_size:
            raise ValueError(
                f"Broadcast from rank {request.root} of {world_size}\n\nhint: ranks start at 0"
            )
        return
    if not request.values.is_contiguous():
        raise ValueError(
            f"{type(request).__name__}: values with strides {tuple(request.values.stride())} are "
            "not contiguous\n\nhint: copy them with .contiguous()"
        )
    if isinstance(request, Mean) and not request.values.dtype.is_floating_point:
        raise ValueError(
            f"Mean of {request.values.dtype}\n\nhint: use a floating-point dtype, or Sum"
        )
    if isinstance(request, ReduceScatter) and request.values.numel() % world_size:
        raise ValueError(
            f"ReduceScatter: {request.values.numel()} elements for {world_size} ranks\n\n"
            "hint: pad the values to a multiple of the number of ranks"
        )
    if isinstance(request, SendReceive) and not 0 <= request.peer < world_size:
        raise ValueError(
            f"SendReceive with rank {request.peer} of {world_size}\n\nhint: ranks start at 0"
        )


def finish_sum(request: Sum | Mean, world_size: int) -> Tensor:
    """Return the answer of a request whose values are the sum: divide them for a mean."""
    if isinstance(request, Mean):
        request.values.div_(world_size)
    return request.values


def scalar_tensor(request: AllGatherScalar) -> Tensor:
    """Return the number as (1,) int64 or float64."""
    dtype = torch.float64 if isinstance(request.value, float) else torch.int64
    return torch.tensor([request.value], dtype=dtype)


def as_bytes(values: Tensor) -> Tensor:
    """Return (bytes,) uint8: a view of `values`, or of a copy if it is not contiguous."""
    # a zero-dimensional tensor has no view of another element size
    return values.contiguous().view(-1).view(torch.uint8)


def copy_back(values: Tensor, flat: Tensor) -> Tensor:
    """Return `values`, after copying `flat`, its bytes, to it if `as_bytes` has copied them."""
    if not values.is_contiguous():
        values.copy_(flat.view(values.dtype).view(values.shape))
    return values
