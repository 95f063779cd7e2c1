"""The layouts of gradients, and the mean of a sparse gradient over the ranks."""

import torch
from torch import Tensor, nn

from gcnzc.exchange import Algorithm, AllGatherScalar, AllToAll
from gcnzc.optim.flat_parameters import to_device

NONE, DENSE, SPARSE = 0, 1, 2


def gradient_layout(parameter: nn.Parameter) -> int:
    """Return the layout of a parameter's gradient: `NONE`, `DENSE` or `SPARSE`."""
    if parameter.grad is None:
        return NONE
    return SPARSE if parameter.grad.is_sparse else DENSE


def mean_of_sparse(parameter: nn.Parameter, factor: float | Tensor) -> Algorithm[Tensor | None]:
    """Return the weighted mean of a sparse gradient over the ranks; None if no rank has one.

    It is a coalesced sparse tensor with the rows of all ranks.
    """
    gradient = parameter.grad
    columns = parameter.shape[1:]
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *columns)
    if gradient is not None:
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        gradient = gradient.coalesce()
        rows, values = (
            gradient.indices()[0],
            gradient.values() * to_device(factor, parameter.device),
        )
    counts = yield AllGatherScalar(len(rows))
    if not sum(counts):
        return None
    width = columns.numel()
    everywhere = len(counts)
    all_rows = yield AllToAll([rows] * everywhere, counts)
    flat = values.reshape(-1)
    all_values = yield AllToAll([flat] * everywhere, [count * width for count in counts])
    return torch.sparse_coo_tensor(
        torch.cat(all_rows)[None],
        torch.cat(all_values).view(-1, *columns) / everywhere,
        parameter.shape,
        check_invariants=False,
    ).coalesce()
