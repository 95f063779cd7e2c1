"""Labels of training nodes as input features: Wang et al., 2021.

"Bag of Tricks for Node Classification with Graph Neural Networks",
https://arxiv.org/abs/2103.13355. In each training step, a random part of the training nodes has its
labels as additional features, and only the other training nodes contribute to the loss, so that no
prediction in the loss depends on the label of the same node. When the model is evaluated, all
training nodes have their labels as features; labels of other nodes are never features.

Notation: N nodes, n nodes of a minibatch, D features, C classes or label columns.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset


class LabelInputs:
    """The labels of the training nodes of a graph, as additional features.

    The label of a class is a one-hot vector (C,). Label columns are 1 and -1 for the labels 1 and
    0, and 0 for an unknown label. Rows of nodes without an input label are 0.

    Args:
        data: the graph; if its training split is empty, no node has an input label.
        num_columns: C.
        is_multi_label: whether these are label columns; otherwise they are classes.

    Raises:
        ValueError: the training nodes have labels of more classes, or in another number of
            columns.
    """

    def __init__(self, data: Dataset, num_columns: int, is_multi_label: bool) -> None:
        self.num_columns = num_columns
        nodes, labels = data.split["train"], data.labels
        if len(nodes):
            _check_labels(labels[nodes], num_columns, is_multi_label)
        self.is_input = torch.zeros(data.graph.num_nodes, dtype=torch.bool)
        if not is_multi_label:
            # classes, or the number of columns for nodes without an input label
            self.values = torch.full((data.graph.num_nodes,), num_columns)
            if len(nodes):
                self.values[nodes] = labels[nodes]
        else:
            self.values = torch.zeros(data.graph.num_nodes, num_columns)
            if len(nodes):
                known = labels[nodes].float()
                self.values[nodes] = torch.where(known.isnan(), 0.0, 2 * known - 1)
        self.is_input[nodes] = True
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def select(self, nodes: Tensor, num_seeds: int, share: float) -> Tensor:
        """Select the nodes that have their labels as features in a training step.

        A fixed number of the seeds is selected, so that the others, which the loss contains, are
        the same part of the seeds on all workers. At least one seed is not selected.

        Args:
            nodes: (n,) int64 on any device; the seeds come first.
            num_seeds: number of seeds, which are training nodes.
            share: in [0, 1), the fraction of the seeds that is selected, and the probability that
                any other training node is selected. Random numbers are from torch's default
                generator.

        Returns:
            (n,) bool on the device of `nodes`.
        """
        # on the host, so that the selection does not depend on the device
        numbers = torch.rand(len(nodes))
        is_drawn = numbers < share
        num_selected = max(min(round(share * num_seeds), num_seeds - 1), 0)
        is_drawn[:num_seeds] = False
        is_drawn[numbers[:num_seeds].argsort(stable=True)[:num_selected]] = True
        return is_drawn.to(nodes.device) & self._tensors(nodes.device)[1][nodes]

    def rows(self, nodes: Tensor, is_selected: Tensor | None = None) -> Tensor:
        """Return the rows of labels, (n, C) float32 on the device of `nodes`.

        Args:
            nodes: (n,) int64 on any device.
            is_selected: (n,) bool, the nodes that have labels; None for all training nodes.
        """
        values = self._tensors(nodes.device)[0][nodes]
        if values.ndim == 2:
            return values if is_selected is None else values * is_selected[:, None]
        if is_selected is not None:
            values = torch.where(is_selected, values, self.num_columns)
        return functional.one_hot(values, self.num_columns + 1)[:, :-1].float()

    def extend(self, x: Tensor, nodes: Tensor, is_selected: Tensor | None = None) -> Tensor:
        """Return (n, D + C): features (n, D) of any dtype, followed by the rows of labels."""
        labels = self.rows(nodes, is_selected)
        return torch.cat([x.to(torch.promote_types(x.dtype, labels.dtype)), labels], dim=1)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            self._on_device[device] = self.values.to(device), self.is_input.to(device)
        return self._on_device[device]


def _check_labels(labels: Tensor, num_columns: int, is_multi_label: bool) -> None:
    """Check that the labels of the training nodes, (n,) or (n, T), are those that a model reads."""
    if is_multi_label:
        fits = labels.ndim == 2 and labels.shape[1] == num_columns
        expected = f"{num_columns} columns"
    else:
        fits = labels.ndim == 1 and int(labels.max()) < num_columns
        expected = f"{num_columns} classes"
    if not fits:
        found = f"{labels.shape[1]} columns" if labels.ndim == 2 else f"class {int(labels.max())}"
        raise ValueError(
            f"the model reads labels of {expected} as features, but the graph's training nodes "
            f"have labels of {found}\n\n"
            "hint: use a graph with the labels of the run, or one without labels"
        )


@dataclass(frozen=True, eq=False)
class LabelledTable(FeatureTable):
    """A table of features whose gathered rows end in the labels of the training nodes.

    Rows cannot be read in place, only gathered, as those of a sparse table.
    """

    table: FeatureTable = field(kw_only=True)
    labels: LabelInputs = field(kw_only=True)

    def __post_init__(self) -> None:
        # the wrapped table has been checked
        pass

    @property
    def is_readable(self) -> bool:
        """False: the rows must be gathered."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of gathered rows: at least float32, whose range the labels have."""
        return torch.promote_types(self.table.dtype, torch.float32)

    @property
    def num_columns(self) -> int:
        """Number of columns, D + C."""
        return self.table.num_columns + self.labels.num_columns

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Gather rows `ids` into a dense (B, D + C) tensor; see `FeatureTable.gather`."""
        rows = self.labels.extend(self.table.gather(ids, threads=threads), ids.long())
        return rows if out is None else out.copy_(rows)


def append_labels(table: FeatureTable, labels: LabelInputs | None) -> FeatureTable:
    """Return a table whose rows end in labels; the table itself without label inputs."""
    return table if labels is None else LabelledTable(table.rows, table=table, labels=labels)
