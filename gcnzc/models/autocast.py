"""The dtype that a model computes in, also under `torch.autocast`."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def compute_dtype(parameter_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the rows of a model: that of its parameters, or of `torch.autocast`.

    Autocast does not change models of float64.

    Args:
        parameter_dtype: dtype of the parameters.
        device: of the rows.
    """
    if parameter_dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return parameter_dtype


def add_linear(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `out + x @ weight.T`, which is in `out` unless autocast is enabled.

    Args:
        out: (n, columns); it may be overwritten.
        x: (n, in_features).
        weight: (columns, in_features), a parameter.
    """
    if torch.is_autocast_enabled(x.device.type):
        # autocast does not apply to operations in place
        return torch.addmm(out, x, weight.t())
    return out.addmm_(x, weight.t())


def normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)` with the dtype of `x`.

    On a GPU, autocast computes layer normalization in float32. Batch normalization of a single row,
    such as that of a last minibatch of one seed, has no variance in training: it uses the running
    statistics, which do not change. In training, no rows are returned as they are.

    Args:
        norm: batch or layer normalization of the columns.
        x: (n, columns) rows.

    Returns:
        (n, columns).
    """
    if norm.training and not x.shape[0]:
        return x
    if isinstance(norm, nn.BatchNorm1d) and norm.training and x.shape[0] == 1:
        return functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        ).to(x.dtype)
    return norm(x).to(x.dtype)
