"""The collective algorithms, and the default one for each size and number of ranks.

The default minimizes a cost: the time of the formulas of `gcnzc.exchange.collectives` in units of
1/B, so that M bytes cost M, and a message costs `latency` = α B bytes. Without a measurement, the
latency is known only roughly: 2 KiB between processes of a machine or over slow links, 128 KiB over
fast links between distant machines. So the default is the algorithm whose cost is at most the
smallest factor above the least one, over these latencies. `tune` measures instead.

The times of bytes are multiplied by factors that were measured with 4 and 8 ranks. In gloo's own
collectives, each message waits until its receiver has posted the receive, whose notification takes
as long as a message.
"""

from collections.abc import Callable
from functools import lru_cache

from gcnzc.exchange.collectives import PIECE_BYTES

BUILTIN = "builtin"
CHAIN = "chain"
# in place of a name: `default_algorithm` selects the algorithm
DEFAULT = "default"
# algorithms for each kind of request; "chain:16384" is a chain in pieces of 16384 bytes,
# and "chain" in those of `PIECE_BYTES`
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "Sum": ("doubling", "halving", "ring", BUILTIN),
    "AllGather": ("doubling", "ring", BUILTIN),
    "Broadcast": ("binomial", CHAIN, BUILTIN),
    "ReduceScatter": ("direct",),
    "AllToAll": ("direct", BUILTIN),
    "SendReceive": ("direct",),
    "AllGatherScalar": ("doubling",),
}
# what builtin means without a process group
LIKE_GLOO = {"Sum": "ring", "AllGather": "ring", "Broadcast": "binomial", "AllToAll": "direct"}

# the latencies that the default is for, in bytes
LATENCIES = tuple(kib * 1024 for kib in (2, 16, 128))
# builtin is preferred to algorithms that are faster by less than this factor: it does not need the
# GIL for each message
BUILTIN_FACTOR = 1.1
# what a piece of a chain costs in addition to its bytes: the time between two messages of a sender
PIECE_OVERHEAD = 1024

# measured time of the bytes, relative to the formulas; 1 if not listed. A round of halving and
# doubling has another peer, so that TCP begins with a small window and no round overlaps with the
# next one; gloo divides messages into segments, which overlap
MEASURED_FACTORS = {
    "Sum": {"doubling": 1.2, "halving": 1.4, BUILTIN: 0.85},
    "AllGather": {BUILTIN: 0.7},
}

# by algorithm, the messages and the bytes that are sent one after the other
_Paths = dict[str, tuple[float, float]]


@lru_cache(maxsize=4096)
def default_algorithm(kind: str, num_bytes: int, world_size: int) -> str:
    """Return the name of the default algorithm, the same on all ranks.

    Args:
        kind: the kind of request, a key of `ALGORITHMS`.
        num_bytes: the size of a rank's values in bytes.
        world_size: the number of ranks.
    """
    if kind not in CRITICAL_PATHS or world_size == 1 or num_bytes == 0:
        return ALGORITHMS[kind][0]
    paths = CRITICAL_PATHS[kind](num_bytes, world_size)
    factors = MEASURED_FACTORS.get(kind, {})
    largest = dict.fromkeys(paths, 0.0)
    for latency in LATENCIES:
        costs = {
            name: messages * latency + factors.get(name, 1.0) * size
            for name, (messages, size) in paths.items()
        }
        least = min(costs.values())
        for name, cost in costs.items():
            allowance = BUILTIN_FACTOR if name == BUILTIN else 1.0
            largest[name] = max(largest[name], cost / least / allowance)
    return min(largest, key=largest.__getitem__)


def _sum_paths(num_bytes: int, world_size: int) -> _Paths:
    rounds = world_size.bit_length() - 1
    power = 1 << rounds
    fold = 0 if power == world_size else 2
    turns = 2 * (world_size - 1)
    halves = 2 * (power - 1) / power
    return {
        "doubling": (rounds + fold, (rounds + fold) * num_bytes),
        "halving": (2 * rounds + fold, (halves + fold) * num_bytes),
        BUILTIN: (2 * turns, turns / world_size * num_bytes),
    }


def _gather_paths(num_bytes: int, world_size: int) -> _Paths:
    others = world_size - 1
    return {
        "doubling": (others.bit_length(), others * num_bytes),
        BUILTIN: (2 * others, others * num_bytes),
    }


def _broadcast_paths(num_bytes: int, world_size: int) -> _Paths:
    others = world_size - 1
    rounds = others.bit_length()
    num_pieces = max(num_bytes / PIECE_BYTES, 1)
    transfers = (num_pieces + others - 1) * (min(PIECE_BYTES, num_bytes) + PIECE_OVERHEAD)
    return {"binomial": (rounds, rounds * num_bytes), CHAIN: (others, transfers)}


# for each kind with several algorithms, a function of the size and the number of ranks that returns
# their critical paths; AllToAll is always direct, because each rank knows only the sizes of its own
# parts
CRITICAL_PATHS: dict[str, Callable[[int, int], _Paths]] = {
    "Sum": _sum_paths,
    "AllGather": _gather_paths,
    "Broadcast": _broadcast_paths,
}
