"""Compute the outputs of a model in minibatches, which are the same for any number of workers.

Notation: M rows of outputs.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.exchange import Group
from gcnzc.train.inference import Progress, counter, evaluation_mode
from gcnzc.train.layerwise.ranges import Span, assign_equal_ranges
from gcnzc.train.layerwise.store import Store

Spans: TypeAlias = Sequence[Span]


@dataclass(frozen=True)
class Evaluated:
    """A model whose outputs are computed, and what the computation needs.

    Attributes:
        model: on `device`; it runs in evaluation mode, and its mode is restored afterwards.
        table: its input features, which the device can read: a `FeatureTable` or `TypedTables`.
        device: of the computation.
        progress: called with (done, total) of the rows that this worker computes.
        group: the workers that share the work, and get the same results. Default: this process.
    """

    model: Any
    table: Any
    device: torch.device
    progress: Progress | None = None
    group: Group = field(default_factory=Group)


def minibatch_outputs(
    of: Evaluated,
    shape: tuple[int, int],
    batch_size: int,
    compute: Callable[[Spans], Generator[Tensor, None, None]],
) -> Tensor:
    """Compute the rows of outputs in minibatches.

    Args:
        of: whose outputs they are.
        shape: M rows, and the number of columns.
        batch_size: rows of a minibatch. It determines how outputs are rounded, so it is the same
            for any number of workers.
        compute: a generator that returns, for ranges (begin, end) of rows, the outputs of each.

    Returns:
        (M, columns) on the host, the same on all workers; those of a machine share the memory.
    """
    store = Store(of.group)
    rows = store.rows("outputs", *shape, next(of.model.parameters()).dtype)
    shares = assign_equal_ranges(shape[0], batch_size, of.group.world_size)
    spans = shares[of.group.rank]
    advance = counter(of.progress, sum(end - begin for begin, end in spans))
    with evaluation_mode(of.model), closing(compute(spans)) as outputs:
        store.compute([rows], shares, lambda begin, end: [next(outputs)], advance)
    found: Tensor = rows.tensor
    return found
