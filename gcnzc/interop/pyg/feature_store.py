"""Feature tables as a PyG `FeatureStore`.

Importing this module imports PyG.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.system.arguments import check_kind

_pyg = import_pyg()


class TableStore(_pyg.data.FeatureStore):  # type: ignore[misc, name-defined]
    """A PyG feature store of tables: `store["paper", "x", ids]` gathers rows.

    Args:
        tables: feature tables by (node type, name); or by name, for a graph without types, whose
            node type is None in PyG.

    Raises:
        TypeError: `tables` is not a mapping.
        ValueError: a value is neither a table nor a tensor of two dimensions.
    """

    def __init__(self, tables: Mapping[Any, FeatureTable]) -> None:
        check_kind("tables", tables, Mapping, "{'x': gcnzc.FeatureTable(rows)}")
        super().__init__()
        self.__dict__["_tables"] = {}
        for key, table in tables.items():
            self._put_tensor(table, _pyg.data.TensorAttr(*_as_key(key), None))

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        if attr.index is not None:
            raise ValueError(
                f"{attr.group_name}, {attr.attr_name} was given with an index: a store of tables "
                "cannot replace single rows\n\nhint: put the whole tensor, with index=None"
            )
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor)
        if isinstance(tensor, Tensor):
            tensor = FeatureTable(tensor)
        if not isinstance(tensor, FeatureTable):
            raise ValueError(
                f"{attr.group_name}, {attr.attr_name} is a {type(tensor).__name__}\n\n"
                "hint: gcnzc.FeatureTable(rows), or a tensor of two dimensions"
            )
        self._tables[attr.group_name, attr.attr_name] = tensor
        return True

    def _get_tensor(self, attr: Any) -> Tensor | None:
        table: FeatureTable | None = self._tables.get((attr.group_name, attr.attr_name))
        if table is None:
            return None
        index = attr.index
        if index is None:
            index = slice(None)
        if isinstance(index, slice):
            index = torch.arange(*index.indices(table.num_rows), device=table.device)
        if isinstance(index, int):
            index = [index]
        return table.gather(torch.as_tensor(index))

    def _remove_tensor(self, attr: Any) -> bool:
        return self._tables.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        table = self._tables.get((attr.group_name, attr.attr_name))
        return None if table is None else (table.num_rows, table.num_columns)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the group and the name of every table."""
        return [_pyg.data.TensorAttr(*key) for key in self._tables]


def _as_key(key: Any) -> tuple[Any, str]:
    return key if isinstance(key, tuple) else (None, key)
