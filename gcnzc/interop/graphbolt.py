"""Tables of features as GraphBolt features."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.dgl.importing import graphbolt_works, import_dgl


def feature(table: FeatureTable) -> Any:
    """Return a table as a `dgl.graphbolt.Feature`, for a GraphBolt feature store.

    `read(ids)` gathers rows on the device of `ids`: a GPU reads a table inside `gcnzc.pinned` in
    place. The feature is read-only: `update` raises an error.

    Args:
        table: any table of features.

    Raises:
        RuntimeError: DGL is not installed, or its GraphBolt is not compiled for this torch.
    """
    dgl = import_dgl()
    if not graphbolt_works():
        raise RuntimeError(
            f"GraphBolt of DGL {dgl.__version__} is not compiled for torch {torch.__version__}\n\n"
            "hint: gcnzc.Loader, or gcnzc.interop.dgl.DataLoader, which need no GraphBolt"
        )
    return _feature_class()(table)


@cache
def _feature_class() -> Any:
    # the base class can be imported only where GraphBolt works

    class TableFeature(import_dgl().graphbolt.Feature):  # type: ignore[misc]
        """Rows of a `gcnzc.FeatureTable`."""

        def __init__(self, table: FeatureTable) -> None:
            super().__init__()
            self.table = table

        def read(self, ids: Tensor | None = None) -> Tensor:
            """Return rows `ids` on the device of `ids`; all rows if None."""
            if ids is None:
                ids = torch.arange(self.table.num_rows, device=self.table.device)
            return self.table.gather(ids)

        def size(self) -> torch.Size:
            """Return the shape of one row."""
            return torch.Size([self.table.num_columns])

        def update(self, value: Tensor, ids: Tensor | None = None) -> None:
            """Raise an error, since the rows are read-only.

            Raises:
                RuntimeError: always.
            """
            raise RuntimeError("a table of features is read-only")

    return TableFeature
