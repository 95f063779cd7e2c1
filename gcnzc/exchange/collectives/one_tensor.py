"""The base of collectives of one tensor."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gcnzc.exchange.requests import (
    DESCRIPTIONS_KEPT,
    Collective,
    HeaderFields,
    count_bytes,
    describe_size,
)

if TYPE_CHECKING:
    from gcnzc.exchange.staging import StagingBuffers


@dataclass(eq=False, slots=True)
class TensorCollective(Collective):
    """A collective of one tensor."""

    values: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return count_bytes(self.values)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the values are on a GPU."""
        return self.values.is_cuda

    def describe_header(self) -> HeaderFields:
        """Describe the kind, size and dtype, which must be the same on all ranks."""
        return _describe(type(self).__name__, self.values.numel(), self.values.dtype)

    def copy_to_host(self, buffers: "StagingBuffers") -> "TensorCollective":
        """Return the request with a copy of the values in a buffer on the host."""
        return replace(self, values=buffers.copy_to_host(self.values))

    def copy_answer(self, answer: Tensor) -> Tensor:
        """Return a copy of the answer on the device of the values."""
        return answer.to(self.values.device)


def check_contiguous(request: TensorCollective) -> None:
    """Raise a ValueError if the values are not contiguous."""
    if not request.values.is_contiguous():
        raise ValueError(
            f"{type(request).__name__}: values with strides {tuple(request.values.stride())} are "
            "not contiguous\n\nhint: copy them with .contiguous()"
        )


@lru_cache(maxsize=DESCRIPTIONS_KEPT)
def _describe(name: str, num_elements: int, dtype: torch.dtype) -> HeaderFields:
    return f"{name} of {describe_size(num_elements, dtype)}", {}, {}
