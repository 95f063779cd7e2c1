"""Class weights that balance the classes of the training nodes."""

import torch
from torch import Tensor


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return the weights with which all classes contribute equally to the loss.

    Args:
        labels: labels of the training nodes: (S,) int64 classes; or (S, T) of 0, 1 or NaN for
            unknown, T label columns.
        num_classes: C, the number of classes; not used for (S, T) labels.

    Returns:
        For classes, (C,) float32: the weight of a class is inversely proportional to its number of
        nodes, and the mean weight of all nodes is 1; a class without a node has weight 0. For
        label columns, (T,) float32 weights of the label 1: the number of zeros divided by the
        number of ones; 1 if a column has no zeros or no ones.
    """
    if labels.ndim == 1:
        counts = torch.bincount(labels, minlength=num_classes).double()
        present = counts > 0
        weights = len(labels) / (present.sum() * counts.clamp(min=1))
        return torch.where(present, weights, 0.0).float()
    ones, zeros = (labels == 1).sum(dim=0), (labels == 0).sum(dim=0)
    has_both = (ones > 0) & (zeros > 0)
    return torch.where(has_both, zeros / ones.clamp(min=1), 1.0).float()
