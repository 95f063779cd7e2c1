"""Cache what is computed from the edges of a block, as long as the block exists."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class BlockCache(Generic[T]):
    """One result for each block, which is deleted with the block's `indices`.

    A result is computed again for another `indptr` or number of sources, and after a write to
    `indptr` or `indices`.
    """

    def __init__(self) -> None:
        self._results: Any = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, indptr: Tensor, indices: Tensor, num_sources: int, compute: Callable[[], T]) -> T:
        """Return the cached result of a block, or compute it."""
        # tensors of inference mode do not count writes, and cannot be used with autograd later
        if torch.is_inference_mode_enabled() or indptr.is_inference() or indices.is_inference():
            return compute()
        state = (id(indptr), indptr._version, indices._version, num_sources)
        cached = self._results.get(indices)
        if cached is not None and cached[0] == state:
            return cached[2]
        result = compute()
        # keep a reference to indptr, so that its id is not reused
        self._results[indices] = (state, indptr, result)
        return result
