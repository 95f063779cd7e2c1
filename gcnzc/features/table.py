"""Tables of node features, in host or GPU memory."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.registrations import copy_to
from gcnzc.kernels.finite import are_finite
from gcnzc.kernels.gather import gather
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.quantize import LARGEST, largest, quantize, scales_of
from gcnzc.kernels.gather.sparse import gather_sparse
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.arguments import THREADS_LIMIT, check_device, check_integer, check_kind, describe

_copying_scales = ForkSafeLock()


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Rows of features, one per node.

    Where the rows lie is the caller's choice: on a GPU, on the host for the CPU, or on the host
    inside `pinned` for GPUs too. They may be memory-mapped and read-only.

    Args:
        rows: (N, D), each row contiguous; or `torch.sparse_csr`, float32, on the host, whose rows
            are spread out when they are gathered; or codes with `scales`, int8, float8_e4m3fn or
            float8_e5m2, which are multiplied by them when they are gathered.
        scales: of codes, float32, contiguous, on any device: (N,), one for each row, or
            (ceil(D / scale_columns),). A device that gathers gets a copy, which the table keeps.
        scale_columns: how many columns share a scale, for all rows; None if each row has its own.
        way: how a GPU's threads share a gather, such as `gcnzc check --tune` measured it; as usual
            if None. It changes no bit of what is gathered.

    Raises:
        TypeError: `scale_columns` or `way` are of another type.
        ValueError: `rows` is no such table, or wants a gradient; or `scales` do not fit it, or are
            not finite.
    """

    rows: Tensor
    scales: Tensor | None = None
    scale_columns: int | None = None
    way: KernelConfig | None = None

    @classmethod
    def quantized(
        cls, rows: Tensor, dtype: torch.dtype = torch.int8, *, scale_columns: int | None = None
    ) -> "FeatureTable":
        """The table of the codes of `rows`: a byte an element.

        `gcnzc.kernels.gather.quantize` says how far codes are from the rows.

        Args:
            rows: (N, D) floating point on the host, finite; D at least 1.
            dtype: int8, float8_e4m3fn or float8_e5m2.
            scale_columns: how many columns share a scale, for all rows; None for a scale a row.

        Raises:
            ValueError: `rows`, `dtype` or `scale_columns` are not of these.
        """
        plain = FeatureTable(rows)
        if scale_columns is not None:
            check_integer("scale_columns", scale_columns, 1, hint="None for a scale a row")
        check_kind("dtype", dtype, torch.dtype, "torch.int8")
        floating = rows.is_floating_point() and rows.device.type == "cpu" and not plain.is_sparse
        if dtype not in LARGEST or not floating or not plain.num_columns:
            raise ValueError(
                f"rows of {rows.dtype} and shape {tuple(rows.shape)} on {rows.device} cannot be "
                f"quantised to {dtype}, with scale_columns {scale_columns}\n\n"
                "hint: floating-point rows on the host; torch.int8, torch.float8_e4m3fn or "
                "torch.float8_e5m2"
            )
        exact = rows.float()
        if not are_finite(exact):
            raise ValueError(
                f"rows that are not finite as float32 cannot be quantised to {dtype}\n\n"
                "hint: rows.nan_to_num(), or keep them as they are"
            )
        scales = scales_of(largest(exact, scale_columns), dtype)
        return FeatureTable(quantize(exact, scales, dtype, scale_columns), scales, scale_columns)

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            what = "an ndarray" if isinstance(rows, np.ndarray) else describe(rows)
            raise ValueError(
                f"rows is {what}, but a table of features is a tensor of two dimensions\n\n"
                "hint: torch.from_numpy(array), and .view(-1, 1) for one feature per node"
            )
        if self.way is not None:
            check_kind("way", self.way, KernelConfig, "None takes the default")
        if rows.requires_grad:
            raise ValueError(
                f"a table of features of shape {tuple(rows.shape)} wants a gradient, which gathers "
                "do not carry\n\nhint: rows.detach()"
            )
        if rows.is_neg() or rows.is_conj():
            # the bytes in memory are those of other values
            raise ValueError(
                f"rows is {describe(rows)} whose values are negated or conjugated when they are "
                "read\n\nhint: rows.resolve_neg().resolve_conj()"
            )
        if self.is_sparse:
            if rows.dtype != torch.float32 or rows.device.type != "cpu":
                raise ValueError(
                    f"a sparse table of features is float32 on the host, not {rows.dtype} on "
                    f"{rows.device}\n\nhint: rows.float().cpu(), or rows.to_dense()"
                )
        elif rows.layout != torch.strided or (rows.shape[1] > 1 and rows.stride(1) != 1):
            strides = f" with strides {rows.stride()}" if rows.layout == torch.strided else ""
            raise ValueError(
                f"a table of features is dense with contiguous rows, or CSR, not {rows.layout} of "
                f"shape {tuple(rows.shape)}{strides}\n\nhint: rows.contiguous() or "
                "rows.to_sparse_csr()"
            )
        self._check_scales()

    def _check_scales(self) -> None:
        scales, per = self.scales, self.scale_columns
        if scales is None and per is None:
            return
        if per is not None:
            check_integer("scale_columns", per, 1, hint="None for a scale a row")
        if scales is not None:
            check_kind("scales", scales, Tensor, "float32, one for each row, or None")
        count = self.num_rows if per is None else -(-self.num_columns // per)
        coded = self.rows.dtype in LARGEST and not self.is_sparse
        if (
            scales is None
            or not coded
            or scales.dtype != torch.float32
            or tuple(scales.shape) != (count,)
            or not scales.is_contiguous()
        ):
            told = None if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
            raise ValueError(
                f"rows of {self.rows.dtype} and shape {tuple(self.rows.shape)} cannot be scaled by "
                f"{told}, with scale_columns {per}\n\n"
                "hint: FeatureTable.quantized(rows) makes codes and their scales"
            )
        if scales.device.type != "meta" and not are_finite(scales.cpu().view(1, -1)):
            raise ValueError(
                f"scales is {describe(scales)} with values that are NaN or infinite\n\n"
                "hint: FeatureTable.quantized(rows) makes codes and their scales"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether the rows are kept as CSR."""
        return self.rows.layout == torch.sparse_csr

    @property
    def num_rows(self) -> int:
        """N."""
        return self.rows.shape[0]

    @property
    def num_columns(self) -> int:
        """D."""
        return self.rows.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored, hence as it crosses the bus."""
        return self.num_columns * self.stored_dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements of a minibatch: float32 if the rows are codes with scales."""
        return self.rows.dtype if self.scales is None else torch.float32

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the elements as they are stored."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Bytes of all the rows' elements, without scales; of entries and indices if sparse."""
        if not self.is_sparse:
            return self.num_rows * self.row_bytes
        rows = self.rows
        return sum(part.nbytes for part in (rows.crow_indices(), rows.col_indices(), rows.values()))

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        kind, scaled = "sparse " if self.is_sparse else "", ""
        if self.scales is not None:
            per = self.scale_columns
            scaled = f", a scale for each {'row' if per is None else f'{per} columns'},"
        return (
            f"FeatureTable({self.num_rows} x {self.num_columns} {kind}{self.stored_dtype}{scaled} "
            f"on {self.device}, {self.nbytes} bytes)"
        )

    def gather(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as a dense (B, D) on the device of `ids`.

        Args:
            ids: (B,) int32 or int64 in [0, N), on the device of the rows; or on a GPU, if the rows
                are inside `pinned`.
            out: (B, D) to write into, on the device of `ids`, of `dtype`; allocated if None. Of
                codes with scales it may also be float16 or bfloat16.
            threads: how many share the work on the host; `torch.get_num_threads()` if None.

        Raises:
            TypeError: `ids` or `out` are no tensors, or `threads` is no integer.
            ValueError, IndexError: as `gcnzc.kernels.gather.gather` does.
        """
        check_gather(ids, out, threads)
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(
            self.rows,
            ids,
            out,
            scales=self.scales_on(ids.device),
            scale_columns=self.scale_columns,
            threads=threads,
            way=self.way,
        )

    def gather_stored(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Rows `ids` as they are stored, hence codes without their scales; dense if they are CSR.

        Args:
            ids: as for `gather`.
            out: (B, D) to write into, of `stored_dtype`; allocated if None.
            threads: as for `gather`.

        Raises:
            TypeError, ValueError, IndexError: as `gather` does.
        """
        check_gather(ids, out, threads)
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(self.rows, ids, out, threads=threads)

    def scales_on(self, device: torch.device) -> Tensor | None:
        """The scales on a device, ready for any stream there; copied once."""
        if self.scales is None or self.scales.device == device:
            return self.scales
        with _copying_scales:
            if device not in self._scales:
                self._scales[device] = self.scales.to(device)
            return self._scales[device]

    @cached_property
    def _scales(self) -> dict[torch.device, Tensor]:
        # no field: a table that is made from the fields of this one begins without copies
        return {}

    def to(self, device: torch.device | str) -> "FeatureTable":
        """The table with its rows and scales on a device; itself if they are there.

        Args:
            device: the host, a GPU, or "cuda" for the current one.
        """
        rows = copy_to(self.rows, check_device("device", device))
        if rows is self.rows:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return replace(self, rows=rows, scales=scales)


def check_gather(ids: object, out: object, threads: object) -> None:
    """Check the types of what a table is asked to gather.

    Raises:
        TypeError: `ids` or `out` are no tensors, or `threads` is no integer.
        ValueError: `threads` is out of range.
    """
    check_kind("ids", ids, Tensor, "torch.as_tensor(ids)")
    if out is not None:
        check_kind("out", out, Tensor, "torch.empty of the rows' shape, or None")
    if threads is not None:
        check_integer("threads", threads, 1, THREADS_LIMIT, "None takes torch.get_num_threads()")
