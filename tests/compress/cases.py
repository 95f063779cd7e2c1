"""All compressions, and steps with them for ranks in lockstep and in processes."""

import torch

from gcnzc import compress
from gcnzc.compress.blocks import NUMBER_FORMATS
from gcnzc.exchange import init_group, lockstep, run

DENSE = {
    "dense": compress.Dense(),
    "dense bfloat16": compress.Dense(torch.bfloat16),
    "dense float16": compress.Dense(torch.float16),
}
# with error feedback
FEEDBACK = {
    "sign": compress.Sign(),
    "sign of 32": compress.Sign(block=32),
    "sign of all": compress.Sign(block=None),
    "sign l1": compress.Sign(scale="l1"),
    "sign l1 of 32": compress.Sign(block=32, scale="l1"),
    "sign l1 of all": compress.Sign(block=None, scale="l1"),
    **{form: compress.Blocks(form, has_feedback=True) for form in NUMBER_FORMATS},
    "int4 at random": compress.Blocks("int4", 96, True, 5, has_feedback=True),
    "float4_e3m0 at random": compress.Blocks("float4_e3m0", stochastic=True, has_feedback=True),
    "int4 of all": compress.Blocks("int4", block=None, has_feedback=True),
    "int4, then bfloat16": compress.Blocks("int4", 32, has_feedback=True, mean_format="bfloat16"),
    "int8, then float32": compress.Blocks("int8", has_feedback=True, mean_format="float32"),
    "float8_e5m2, then int4": compress.Blocks(
        "float8_e5m2", 64, True, has_feedback=True, mean_format="int4"
    ),
    "rounded": compress.Rounded(has_feedback=True),
    "rounded float16": compress.Rounded(torch.float16, has_feedback=True),
}
NO_FEEDBACK = {
    "sign without errors": compress.Sign(block=32, has_feedback=False),
    "int8 without errors": compress.Blocks("int8", 32),
    "int4 at random without errors": compress.Blocks("int4", stochastic=True),
    "int4, then float32, without errors": compress.Blocks("int4", mean_format="float32"),
    "rounded without errors": compress.Rounded(),
    "rounded float32": compress.Rounded(torch.float32),
}
COMPRESSIONS = DENSE | FEEDBACK | NO_FEEDBACK
CODES = FEEDBACK | NO_FEEDBACK
# which send some of the elements; all with error feedback, except the last ones
SPARSE = {
    "topk": compress.TopK(0.1),
    "topk of 32": compress.TopK(0.05, per=32),
    "topk of layers float16": compress.TopK(0.2, "layer", "float16"),
    "topk of all bfloat16": compress.TopK(0.03, "all", "bfloat16"),
    "topk int2": compress.TopK(0.1, 64, "int2"),
    "sparseloco": compress.TopK.sparse_loco(0.1),
    "randomk": compress.RandomK(0.1),
    "randomk most": compress.RandomK(0.8, seed=2**32 - 1),
    "randomk different": compress.RandomK(0.2, 7, same=False),
    "block": compress.RandomBlock(0.15, 3),
    "threshold": compress.Threshold(0.1, refresh=2),
    "threshold of 32": compress.Threshold(0.05, 3, per=32),
    "topk without errors": compress.TopK(0.1, error_feedback=False),
    "randomk without errors": compress.RandomK(0.25, error_feedback=False),
    "threshold without errors": compress.Threshold(0.1, error_feedback=False),
}
SPARSE_FEEDBACK = {name: each for name, each in SPARSE.items() if each.has_feedback}
# that add the whole error to the next vector
NO_DECAY = {name: each for name, each in SPARSE_FEEDBACK.items() if name != "sparseloco"}
ALL = COMPRESSIONS | SPARSE
# a few compressions, for slow tests
FEW = {
    name: ALL[name]
    for name in (
        *("dense", "sign of 32", "int8", "float4_e3m0 at random", "int4, then bfloat16"),
        *("topk of 32", "topk int2", "randomk", "threshold of 32"),
    )
}


def reducers(way, num_elements, world_size, dtype=torch.float32, device="cpu", layers=()):
    """Return the reducers of all ranks."""
    info = torch.device(device), dtype, layers
    places = [compress.WorkerInfo(rank, world_size, *info) for rank in range(world_size)]
    return [way.reducer(num_elements, place) for place in places]


def vectors(count, world_size, step=0, dtype=torch.float32):
    """Return a vector (count,) per rank, with elements of several magnitudes and zeros."""
    generator = torch.Generator().manual_seed(100 * step + world_size)
    found = torch.randn(world_size, count, generator=generator, dtype=torch.float64)
    found *= torch.exp(2 * torch.randn(count, generator=generator, dtype=torch.float64))
    found[:, ::7] = 0
    return [row.to(dtype) for row in found]


def masked(count, share=0.7):
    """Return (count,) bool: a random mask of active elements."""
    return torch.rand(count, generator=torch.Generator().manual_seed(3)) < share


def mean_of(them, given, extras=0):
    """Return the results of one mean, which must succeed, of all ranks."""
    outcome, found = attempt(them, given, extras)
    assert outcome.results == [""] * len(them)
    return found


def attempt(them, given, extras=0):
    """Compute one mean, which may fail, of copies; return the outcome and the copies."""
    found = [vector.clone() for vector in given]
    outcome = lockstep(
        [each.mean(vector, extras) for each, vector in zip(them, found, strict=True)]
    )
    return outcome, found


def errors_of(them):
    """Return copies of the state of all reducers."""
    return [{name: error.clone() for name, error in each.errors().items()} for each in them]


def are_same(errors, others):
    """Whether two states are equal bit for bit."""
    return [list(each) for each in errors] == [list(each) for each in others] and all(
        torch.equal(each[name], other[name])
        for each, other in zip(errors, others, strict=True)
        for name in each
    )


def pending(them):
    """Return (n,) float64: the errors of all ranks, as a share of the mean."""
    total = torch.zeros(them[0].num_elements, dtype=torch.float64)
    if them[0].server_error is not None:
        total += torch.cat([each.server_error for each in them])
    for each in them:
        total += each.worker_error.double() / len(them)
    return total


def steps_of(rank, world_size, lengths):
    """Return the means of one rank, step by step; an algorithm.

    Args:
        lengths: names of compressions, by length of the vectors.
    """
    found = []
    for count, names in lengths.items():
        for name in names:
            reducer = reducers(ALL[name], count, world_size)[rank]
            for step in range(2):
                values = vectors(count + 2, world_size, step)[rank]
                assert (yield from reducer.mean(values, 2)) == ""
                found.append(values)
    return found


def as_worker(lengths):
    """Run `steps_of` in a process; return the means and the bytes sent."""
    with init_group() as group:
        before = group.ledger.bytes_sent
        found = run(steps_of(group.rank, group.world_size, lengths), group)
        return found, group.ledger.bytes_sent - before
