"""The algorithm that executes a request, and how many bytes it sends.

The answers of a request do not depend on the choice, except for the order in which sums are added.
`builtin` is the process group's own; in one process, where there is none, it is what gloo does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import collectives
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
    bytes_of,
)

BUILTIN = "builtin"
CHAIN = "chain"
# what may answer a kind of request; the first is what small ones get where nothing was measured.
# "chain:16384" is a chain in pieces of so many bytes
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "Sum": ("doubling", "halving", "ring", BUILTIN),
    "AllGather": ("doubling", "ring", BUILTIN),
    "Broadcast": ("binomial", CHAIN, BUILTIN),
    "ReduceScatter": ("direct",),
    "AllToAll": ("direct", BUILTIN),
    "SendReceive": ("direct",),
    "AllGatherScalar": ("doubling",),
}
# what builtin stands for where there is no process group
_LIKE_GLOO = {"Sum": "ring", "AllGather": "ring", "Broadcast": "binomial", "AllToAll": "direct"}
# up to so many bytes a message's time is mostly its latency: 64 KiB take 5 ms at 100 Mbit/s
SMALL_BYTES = 16 * 1024
DEFAULT_STEPS: dict[str, "Steps"] = {
    "Sum": ((SMALL_BYTES, "doubling"), (None, BUILTIN)),
    "AllGather": ((SMALL_BYTES, "doubling"), (None, BUILTIN)),
    "Broadcast": ((SMALL_BYTES, "binomial"), (None, CHAIN)),
    "AllToAll": ((None, "direct"),),
    "ReduceScatter": ((None, "direct"),),
    "SendReceive": ((None, "direct"),),
    "AllGatherScalar": ((None, "doubling"),),
}
Steps = tuple[tuple[int | None, str], ...]


@dataclass(frozen=True)
class Choices:
    """For each kind of request, which algorithm serves up to how many bytes.

    Raises:
        ValueError: an algorithm is not known, or steps do not serve every size.
    """

    steps: Mapping[str, Steps] = field(default_factory=dict)
    """(bytes or None for any, name of the algorithm), ascending, of a kind; a kind that is not
    there gets the usual ones"""

    def __post_init__(self) -> None:
        for kind, steps in self.steps.items():
            for _, name in steps:
                _check_known(kind, name)
            limits = [math.inf if limit is None else limit for limit, _ in steps]
            if limits != sorted(set(limits)) or limits[-1:] != [math.inf]:
                raise ValueError(
                    f"{kind}: steps {tuple(steps)} do not serve every size\n\n"
                    "hint: their bytes rise, and None comes last"
                )
            # workers send parts of different sizes, and would choose differently
            if kind == "AllToAll" and len(steps) > 1:
                raise ValueError(
                    f"AllToAll: steps {tuple(steps)} tell sizes apart\n\n"
                    "hint: one algorithm must serve all, as each worker knows only its own sizes"
                )

    def of(self, request: Collective) -> str:
        """The name of the algorithm that answers `request`."""
        return self.name_of(kind_of(request), bytes_of(request))

    def name_of(self, kind: str, num_bytes: int) -> str:
        """The name of the algorithm that answers a request of this kind and size."""
        for limit, name in self.steps.get(kind, DEFAULT_STEPS[kind]):
            if limit is None or num_bytes <= limit:
                return name
        raise AssertionError("the last step of a kind has no limit")

    @classmethod
    def always(cls, **names: str) -> "Choices":
        """These algorithms whatever the size, such as `always(Sum="ring")`; else the usual ones.

        Raises:
            ValueError: there is no such algorithm for that kind.
        """
        return cls().but(**names)

    def but(self, **names: str) -> "Choices":
        """These, but of some kinds one algorithm whatever the size, as for `always`."""
        return Choices({**self.steps, **{kind: ((None, name),) for kind, name in names.items()}})


def _check_known(kind: str, name: str) -> None:
    plain, colon, piece = name.partition(":")
    fits = not colon or (plain == CHAIN and piece.isdecimal() and int(piece) > 0)
    if plain not in ALGORITHMS.get(kind, ()) or not fits:
        known = ", ".join(ALGORITHMS.get(kind, ALGORITHMS))
        raise ValueError(f"no algorithm {name!r} for {kind}\n\nhint: there are {known}")


def kind_of(request: Collective) -> str:
    """The kind that algorithms are chosen for; a mean is a sum."""
    return "Sum" if isinstance(request, Mean) else type(request).__name__


def expand(
    request: Collective, rank: int, world_size: int, choices: Choices, name: str | None = None
) -> Algorithm[Any]:
    """The messages that answer `request` on worker `rank`, and the answer.

    Args:
        request: whose tensors lie on the host.
        rank: of this worker.
        world_size: how many workers there are.
        choices: which algorithm to take.
        name: of the algorithm, in place of the choice.

    Raises:
        ValueError: the request does not fit the number of workers.
    """
    check_request(request, world_size)
    kind = kind_of(request)
    name = name or choices.of(request)
    if name == BUILTIN:
        name = _LIKE_GLOO[kind]
    name, _, piece = name.partition(":")
    if isinstance(request, Sum | Mean):
        way = getattr(collectives, f"{name}_sum")
        yield from way(request.values.view(-1), rank, world_size)
        return finished(request, world_size)
    if isinstance(request, AllGather):
        way = getattr(collectives, f"{name}_gather")
        rows = yield from way(as_bytes(request.values), rank, world_size)
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
        return restored(request.values, flat)
    if isinstance(request, SendReceive):
        flat = yield from collectives.swap(as_bytes(request.values), request.peer, rank)
        return flat.view(request.values.dtype).view(request.values.shape)
    counts = request.counts
    if counts is None:
        sizes = [torch.tensor([len(part)]) for part in request.parts]
        told = yield from collectives.direct_exchange(sizes, [1] * world_size, rank)
        counts = [int(count) for count in told]
    dtype, size = request.parts[0].dtype, request.parts[0].element_size()
    parts = yield from collectives.direct_exchange(
        [as_bytes(part) for part in request.parts], [count * size for count in counts], rank
    )
    return [part.view(dtype) for part in parts]


def sent_bytes(request: Collective, rank: int, world_size: int, name: str) -> float:
    """The bytes that worker `rank` sends for a request: the formula of its algorithm.

    Exact where the elements divide by the number of workers, and for sums by halving where that is
    a power of two. Of a `builtin` it is what gloo's algorithms send.
    """
    size, world = bytes_of(request), world_size
    if name == BUILTIN:
        name = _LIKE_GLOO[kind_of(request)]
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
        place = (rank - request.root) % world
        if name.startswith(CHAIN):
            return size if place < world - 1 else 0
        step = 1
        while step < world and not place & step:
            step *= 2
        return size * sum(place + (1 << b) < world for b in range(step.bit_length() - 1))
    own = request.parts[rank].numel() * request.parts[rank].element_size()
    return size - own + (8 * (world - 1) if request.counts is None else 0)


def check_request(request: Collective, world_size: int) -> None:
    """Raise a ValueError if `request` does not fit so many workers."""
    if isinstance(request, AllToAll):
        if len(request.parts) != world_size:
            raise ValueError(
                f"AllToAll: {len(request.parts)} parts for {world_size} workers\n\n"
                "hint: one for each, which may be empty"
            )
        if len({part.dtype for part in request.parts}) > 1:
            raise ValueError(
                "AllToAll: parts of several dtypes\n\nhint: send bytes, with .view(torch.uint8)"
            )
        return
    if isinstance(request, AllGatherScalar):
        return
    if isinstance(request, Broadcast):
        if not 0 <= request.root < world_size:
            raise ValueError(
                f"Broadcast from worker {request.root} of {world_size}\n\n"
                "hint: workers are counted from 0"
            )
        return
    if not request.values.is_contiguous():
        raise ValueError(
            f"{type(request).__name__}: values of strides {tuple(request.values.stride())} are not "
            "contiguous\n\nhint: .contiguous() makes a copy that is"
        )
    if isinstance(request, Mean) and not request.values.dtype.is_floating_point:
        raise ValueError(
            f"Mean of {request.values.dtype}\n\nhint: Sum takes whole numbers; a mean needs floats"
        )
    if isinstance(request, ReduceScatter) and request.values.numel() % world_size:
        raise ValueError(
            f"ReduceScatter: {request.values.numel()} elements for {world_size} workers\n\n"
            "hint: pad them to a multiple"
        )
    if isinstance(request, SendReceive) and not 0 <= request.peer < world_size:
        raise ValueError(
            f"SendReceive with rank {request.peer} of {world_size}\n\nhint: ranks start at 0"
        )


def finished(request: Sum | Mean, world_size: int) -> Tensor:
    """The answer, of the sum that lies in the request's values."""
    if isinstance(request, Mean):
        request.values.div_(world_size)
    return request.values


def scalar_tensor(request: AllGatherScalar) -> Tensor:
    """(1,), int64 or float64, of the number."""
    dtype = torch.float64 if isinstance(request.value, float) else torch.int64
    return torch.tensor([request.value], dtype=dtype)


def as_bytes(values: Tensor) -> Tensor:
    """(bytes,) uint8 of the same memory, or of a copy if `values` is not contiguous."""
    # a tensor of no dimension has no view of another size
    return values.contiguous().view(-1).view(torch.uint8)


def restored(values: Tensor, flat: Tensor) -> Tensor:
    """`values`, once its bytes, in its own memory or in a copy, have come."""
    if not values.is_contiguous():
        values.copy_(flat.view(values.dtype).view(values.shape))
    return values
