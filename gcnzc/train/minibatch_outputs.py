"""Compute the outputs of a model in minibatches that do not depend on the number of workers."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.train.layerwise.ranges import assign_equal_ranges
from gcnzc.train.layerwise.workers import MemoryRows, Workers

Spans: TypeAlias = Sequence[tuple[int, int]]


def minibatch_outputs(
    model: nn.Module,
    shape: tuple[int, int],
    batch_size: int,
    compute: Callable[[Spans], Generator[Tensor, None, None]],
    progress: Callable[[int, int], object] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Compute the rows of outputs, with the model in evaluation mode, which is restored afterwards.

    Args:
        model: whose outputs they are.
        shape: M rows, and the number of columns.
        batch_size: rows of a minibatch. It determines how outputs are rounded, so it is the same
            for any number of workers.
        compute: a generator that returns, for ranges (begin, end) of rows, the outputs of each.
        progress: called with (done, total) of the rows that this worker computes.
        group: the workers among which the rows are divided. Default: this process only.

    Returns:
        (M, columns) on the host, the same on all workers; those of a machine share the memory.
    """
    workers = Workers(group or Group())
    rows = MemoryRows(workers.empty(next(model.parameters()).dtype, *shape))
    shares = assign_equal_ranges(shape[0], batch_size, workers.count)
    spans = shares[workers.rank]
    done, total = 0, sum(end - begin for begin, end in spans)
    was_training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            joint_work(workers.group) as work,
            closing(compute(spans)) as outputs,
        ):
            for (begin, end), own in zip(spans, outputs, strict=True):
                rows.write(begin, end, own)
                done += end - begin
                if progress is not None:
                    progress(done, total)
                work.report_progress()
    finally:
        model.train(was_training)
    workers.distribute(rows, shares)
    return rows.tensor
