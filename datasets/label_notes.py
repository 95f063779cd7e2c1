"""What a user may not expect of labels: how many are missing, and gaps in the class numbers.

Notation: N nodes, T tasks.
"""

import numpy as np

from gcnzc.datasets.rows import Array

# a label that means none is at least this far from the classes
LEAST_GAP = 10


def describe_missing(labels: Array) -> str:
    """Return how many labels are missing; "" if none is.

    Args:
        labels: (N,) or (N, T); -1 or NaN for no label.
    """
    is_missing = np.isnan(labels) if labels.dtype.kind == "f" else labels < 0
    count = np.count_nonzero(is_missing)
    return f"{count:,} of {labels.size:,} labels are missing" if count else ""


def describe_gap(labels: Array) -> str:
    """Return a warning of gaps in the class numbers, as with a class 255 for no label; else "".

    There are gaps if at most a tenth of the classes from 0 to the largest have a label, or if
    most of the others are between two classes.

    Args:
        labels: (N,) or (N, T) of cleaned labels. Labels of several tasks are not checked.
    """
    if labels.ndim != 1 or labels.dtype.kind != "i":
        return ""
    classes = np.flatnonzero(np.bincount(labels + 1)[1:])
    if not len(classes):
        return ""
    gaps = np.diff(classes, prepend=-1) - 1
    place, count = int(gaps.argmax()), int(classes[-1]) + 1
    is_wide = gaps[place] >= LEAST_GAP and 2 * gaps[place] > gaps.sum()
    if not is_wide and count < LEAST_GAP * len(classes):
        return ""
    after = int(classes[place if is_wide else -1])
    between = f", and none from {after - int(gaps[place])} to {after - 1}" if is_wide else ""
    remedy = "number the classes from 0"
    if place or not is_wide:
        remedy = (
            f"if {after} means no label, replace it by -1, or in the .toml of tables set "
            f"missing = [{after}]; otherwise {remedy}"
        )
    return (
        f"the labels have {len(classes):,} different classes{between}, but the model predicts "
        f"{count:,}; {remedy}"
    )
