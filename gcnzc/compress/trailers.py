"""Trailers: the numbers that a rank sends with the elements of a vector.

A trailer is (1 + k,) float32: the number of elements that are not finite, and the k extras.
"""

import torch
from torch import Tensor

from gcnzc.compress.reducer import Reducer, describe_non_finite
from gcnzc.system.scalars import read_scalars


def make_trailer(bad: Tensor, extras: Tensor) -> Tensor:
    """Return a trailer.

    Args:
        bad: () or (1,), the number of elements that are not finite.
        extras: (k,).
    """
    return torch.cat([bad.float().view(1), extras.float()])


def read_trailers(reducer: Reducer, trailers: Tensor, extras: Tensor, *flags: Tensor) -> str:
    """Read the trailers of all ranks, and write the sums of the extras if all are finite.

    Args:
        reducer: gets the sums on the host, as `extra_sums`.
        trailers: (W, 1 + k).
        extras: (k,), overwritten.
        flags: () bool, read together with the trailers: whether there is a mean.

    Returns:
        Why there is no mean; empty if there is.
    """
    bad = trailers[:, 0] + (~trailers.isfinite()).sum(dim=1)
    sums = trailers[:, 1:].sum(dim=0)
    counts, extra_sums, *found = read_scalars(bad, sums, *flags)
    if any(counts) or not all(flag for (flag,) in found):
        return describe_non_finite(counts)
    extras.copy_(sums)
    reducer.extra_sums = extra_sums
    return ""
