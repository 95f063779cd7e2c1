"""The default collective algorithm for each kind, size and number of ranks.

The default minimizes a cost: the time of the formulas of `gcnzc.exchange.collectives` in units of
1/B, so that M bytes cost M, and a message costs `latency` = α B bytes. Without a measurement, the
latency is known only roughly: 2 KiB between processes of a machine or over slow links, 128 KiB over
fast links between distant machines. So the default is the algorithm whose largest ratio to the
least cost, over these latencies, is the smallest. `Choices`
selects others.

The times of bytes are multiplied by factors that were measured with 4 and 8 ranks. In gloo's own
collectives, each message waits until its receiver has posted the receive, whose notification takes
as long as a message.
"""

from functools import lru_cache

from gcnzc.exchange.collectives import COLLECTIVES
from gcnzc.exchange.requests import BUILTIN

# in place of a name: `default_algorithm` selects the algorithm
DEFAULT = "default"
# algorithms for each kind of request
ALGORITHMS = {kind: request.algorithms for kind, request in COLLECTIVES.items()}

# the latencies that the default is for, in bytes
LATENCIES = tuple(kib * 1024 for kib in (2, 16, 128))
# builtin is preferred to algorithms that are faster by less than this factor: it does not need the
# GIL for each message
BUILTIN_FACTOR = 1.1

# measured time of the bytes, relative to the formulas; 1 if not listed. A round of halving and
# doubling has another peer, so that TCP begins with a small window and no round overlaps with the
# next one; gloo divides messages into segments, which overlap
MEASURED_FACTORS = {
    "Sum": {"doubling": 1.2, "halving": 1.4, BUILTIN: 0.85},
    "AllGather": {BUILTIN: 0.7},
}


@lru_cache(maxsize=4096)
def default_algorithm(kind: str, num_bytes: int, world_size: int) -> str:
    """Return the name of the default algorithm, the same on all ranks.

    Args:
        kind: the kind of request, a key of `ALGORITHMS`.
        num_bytes: the size of a rank's values in bytes.
        world_size: the number of ranks.
    """
    request = COLLECTIVES[kind]
    paths = request.critical_paths(num_bytes, world_size) if world_size > 1 and num_bytes else {}
    if not paths:
        return request.algorithms[0]
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
