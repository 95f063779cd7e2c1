"""Tables of features as GraphBolt features."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.dgl.importing import graphbolt_works, import_dgl


def feature(table: FeatureTable) -> Any:
    """The table as a `dgl.graphbolt.Feature`, for a GraphBolt feature store.

    `read(ids)` gathers rows on the device of `ids`: a GPU reads a table that is inside
    `gcnzc.pinned` in place. The rows are not written to, so `update` is refused.

    Args:
        table: of any kind.

    Raises:
        RuntimeError: there is no DGL, or its GraphBolt is not made for this torch.
    """
    dgl = import_dgl()
    if not graphbolt_works():
        raise RuntimeError(
            f"GraphBolt of DGL {dgl.__version__} is not made for torch {torch.__version__}\n\n"
            "hint: gcnzc.Loader, or gcnzc.interop.dgl.DataLoader, which need no GraphBolt"
        )
    return _feature_class()(table)


@cache
def _feature_class() -> Any:
    # the base is there only where GraphBolt works

    class TableFeature(import_dgl().graphbolt.Feature):  # type: ignore[misc]
        """Rows of a `gcnzc.FeatureTable`."""

        def __init__(self, table: FeatureTable) -> None:
            super().__init__()
            self.table = table

        def read(self, ids: Tensor | None = None) -> Tensor:
            """Rows `ids`, where these lie; all rows if None."""
            if ids is None:
                ids = torch.arange(self.table.num_rows, device=self.table.device)
            return self.table.gather(ids)

        def size(self) -> torch.Size:
            """Of one row."""
            return torch.Size([self.table.num_columns])

        def update(self, value: Tensor, ids: Tensor | None = None) -> None:
            """Refused.

            Raises:
                RuntimeError: always.
            """
            raise RuntimeError(
                "the rows of a table of features are not written to\n\n"
                "hint: gcnzc.FeatureTable(rows) of other rows"
            )

    return TableFeature
