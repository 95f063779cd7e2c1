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
from gcnzc.kernels.gather.quantize import MAX_CODE, compute_scales, largest, quantize
from gcnzc.kernels.gather.sparse import gather_sparse
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.arguments import THREADS_LIMIT, check_device, check_integer, check_kind, describe

_scales_lock = ForkSafeLock()


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """A table of features, one row per node, from which minibatches are gathered.

    The rows are in the memory of a GPU or of the host. The CPU gathers rows from host memory. A GPU
    gathers rows from its own memory, or from host memory while they are page-locked in a
    `with gcnzc.pinned(table)` block. Rows may be memory-mapped and read-only.

    Args:
        rows: one of

            - (N, D) of any dtype, each row contiguous;
            - (N, D) `torch.sparse_csr`, float32 on the host; gathered rows are dense;
            - (N, D) quantized codes of int8, float8_e4m3fn or float8_e5m2 with `scales`; gathered
              rows are dequantized.
        scales: scales of codes, float32, contiguous, on any device: (N,), one for each row, or
            (ceil(D / scale_columns),). The table caches a copy on each device that gathers.
        scale_columns: number of adjacent columns that share a scale; None for one scale per row.
        kernel_config: configuration of the GPU's gather kernel, such as the one that
            `gcnzc check --tune` finds. It does not change the results.

    Raises:
        TypeError: `scales` is not a tensor, `scale_columns` is not an integer, or `kernel_config`
            is not a `KernelConfig`.
        ValueError: `rows` is not such a table or requires a gradient, `scales` have another shape
            or dtype or are not finite, or `scale_columns` is below 1.
    """

    rows: Tensor
    scales: Tensor | None = None
    scale_columns: int | None = None
    kernel_config: KernelConfig | None = None

    @classmethod
    def quantized(
        cls, rows: Tensor, dtype: torch.dtype = torch.int8, *, scale_columns: int | None = None
    ) -> "FeatureTable":
        """Return a table of quantized rows, with one byte for each element.

        `gcnzc.kernels.gather.quantize` states the quantization error.

        Args:
            rows: (N, D) floating point on the host, finite; D at least 1.
            dtype: int8, float8_e4m3fn or float8_e5m2.
            scale_columns: number of adjacent columns that share a scale; None for one scale per
                row.

        Raises:
            TypeError: `dtype` is not a `torch.dtype`, or `scale_columns` is not an integer.
            ValueError: `rows`, `dtype` or `scale_columns` is not supported.
        """
        plain = FeatureTable(rows)
        if scale_columns is not None:
            check_integer("scale_columns", scale_columns, 1, hint="None for one scale per row")
        check_kind("dtype", dtype, torch.dtype, "torch.int8")
        floating = rows.is_floating_point() and rows.device.type == "cpu" and not plain.is_sparse
        if dtype not in MAX_CODE or not floating or not plain.num_columns:
            raise ValueError(
                f"rows of {rows.dtype} and shape {tuple(rows.shape)} on {rows.device} cannot be "
                f"quantized to {dtype}, with scale_columns {scale_columns}\n\n"
                "hint: floating-point rows on the host; torch.int8, torch.float8_e4m3fn or "
                "torch.float8_e5m2"
            )
        rows_float32 = rows.float()
        if not are_finite(rows_float32):
            raise ValueError(
                f"rows that are not finite as float32 cannot be quantized to {dtype}\n\n"
                "hint: rows.nan_to_num(), or FeatureTable(rows) without quantization"
            )
        scales = compute_scales(largest(rows_float32, scale_columns), dtype)
        codes = quantize(rows_float32, scales, dtype, scale_columns)
        return FeatureTable(codes, scales, scale_columns)

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            what = "an ndarray" if isinstance(rows, np.ndarray) else describe(rows)
            hint = "torch.from_numpy(array), and .view(-1, 1) for one feature per node"
            if rows is None:
                hint = "use data.table, because data.features is None if the features are quantized"
            raise ValueError(
                f"rows is {what}, but a table of features is a tensor of two dimensions\n\n"
                f"hint: {hint}"
            )
        if self.kernel_config is not None:
            check_kind("kernel_config", self.kernel_config, KernelConfig, "None is the default")
        if rows.requires_grad:
            raise ValueError(
                f"a table of features of shape {tuple(rows.shape)} requires a gradient, which "
                "gathers do not propagate\n\nhint: rows.detach()"
            )
        if rows.is_neg() or rows.is_conj():
            # lazily negated or conjugated: the memory holds other values
            raise ValueError(
                f"rows is {describe(rows)} whose values are negated or conjugated when they are "
                "read\n\nhint: rows.resolve_neg().resolve_conj()"
            )
        if rows.is_complex():
            raise ValueError(
                f"rows is {describe(rows)}, but a table of features has real values\n\n"
                "hint: torch.view_as_real(rows).flatten(1)"
            )
        if self.is_sparse:
            if rows.dtype != torch.float32 or rows.device.type != "cpu":
                raise ValueError(
                    f"a sparse table of features is float32 on the host, not {rows.dtype} on "
                    f"{rows.device}\n\nhint: rows.float().cpu(), or rows.to_dense()"
                )
        elif rows.layout != torch.strided or (
            # NumPy's strides of an empty array are 0
            rows.numel() > 0 and rows.shape[1] > 1 and rows.stride(1) != 1
        ):
            strides = f" with strides {rows.stride()}" if rows.layout == torch.strided else ""
            raise ValueError(
                f"a table of features is dense with contiguous rows, or CSR, not {rows.layout} of "
                f"shape {tuple(rows.shape)}{strides}\n\nhint: rows.contiguous() or "
                "rows.to_sparse_csr()"
            )
        self._check_scales()

    def _check_scales(self) -> None:
        scales, columns = self.scales, self.scale_columns
        if scales is None and columns is None:
            return
        if columns is not None:
            check_integer("scale_columns", columns, 1, hint="None for one scale per row")
        if scales is not None:
            check_kind("scales", scales, Tensor, "float32, one for each row, or None")
        count = self.num_rows if columns is None else -(-self.num_columns // columns)
        is_quantized = self.rows.dtype in MAX_CODE and not self.is_sparse
        if (
            scales is None
            or not is_quantized
            or scales.dtype != torch.float32
            or tuple(scales.shape) != (count,)
            or not scales.is_contiguous()
        ):
            given = None if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
            raise ValueError(
                f"rows of {self.rows.dtype} and shape {tuple(self.rows.shape)} cannot be scaled by "
                f"{given}, with scale_columns {columns}\n\n"
                "hint: FeatureTable.quantized(rows) makes codes and their scales"
            )
        if scales.device.type != "meta" and not are_finite(scales.cpu().view(1, -1)):
            raise ValueError(
                f"scales is {describe(scales)} with values that are NaN or infinite\n\n"
                "hint: `gcnzc info FOLDER --verify` reports what is damaged in a prepared folder"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether the rows are stored as CSR."""
        return self.rows.layout == torch.sparse_csr

    @property
    def is_readable(self) -> bool:
        """Whether gathered rows are rows of `rows`, so that kernels can read them in place."""
        return not self.is_sparse and self.scales is None

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return self.rows.shape[0]

    @property
    def num_columns(self) -> int:
        """Number of columns, D."""
        return self.rows.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one dense row of `stored_dtype`, without scales and padding."""
        return self.num_columns * self.stored_dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of gathered rows: float32 if the rows are codes with scales."""
        return self.rows.dtype if self.scales is None else torch.float32

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the rows as they are stored."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Bytes of all rows without scales; of the values and indices if sparse."""
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
        """Gather rows `ids` into a dense (B, D) tensor on the device of `ids`.

        Args:
            ids: (B,) int32 or int64 in [0, N), on the device of the rows; or on a GPU, while the
                rows are page-locked by `gcnzc.pinned`. A GPU checks the range only if the
                environment variable GCNZC_CHECK_IDS is set and not empty; otherwise ids out of
                range read out of bounds.
            out: (B, D) of `dtype` on the device of `ids`, to write into; allocated if None. For
                codes with scales it may also be float16 or bfloat16.
            threads: number of threads on the host. Default: `torch.get_num_threads()`.

        Raises:
            TypeError: `ids` or `out` is not a tensor, or `threads` is not an integer.
            ValueError, IndexError: see `gcnzc.kernels.gather.gather`.
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
            config=self.kernel_config,
        )

    def gather_stored(
        self, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
    ) -> Tensor:
        """Gather rows `ids` without dequantizing them; CSR rows become dense.

        Args:
            ids: see `gather`.
            out: (B, D) of `stored_dtype`, to write into; allocated if None.
            threads: see `gather`.

        Raises:
            TypeError, ValueError, IndexError: see `gather`.
        """
        check_gather(ids, out, threads)
        if self.is_sparse:
            return gather_sparse(self.rows, ids, out, threads=threads)
        return gather(self.rows, ids, out, threads=threads)

    def scales_on(self, device: torch.device) -> Tensor | None:
        """Return the scales on a device, to which they are copied once.

        A copy from the host is complete when this returns. A copy between GPUs is asynchronous:
        other streams must wait for the stream of `device` that was current at the first call.
        """
        if self.scales is None or self.scales.device == device:
            return self.scales
        with _scales_lock:
            if device not in self._scales:
                self._scales[device] = self.scales.to(device)
            return self._scales[device]

    @cached_property
    def _scales(self) -> dict[torch.device, Tensor]:
        # not a field, so that `dataclasses.replace` does not share the copies
        return {}

    def to(self, device: torch.device | str) -> "FeatureTable":
        """Return the table with its rows and scales on a device.

        If the rows are there already, this is the table itself, and its scales stay where they are.

        Args:
            device: the host, a GPU, or "cuda" for the current GPU.
        """
        rows = copy_to(self.rows, check_device("device", device))
        if rows is self.rows:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return replace(self, rows=rows, scales=scales)


def check_gather(ids: object, out: object, threads: object) -> None:
    """Check the types of the arguments of a gather.

    Raises:
        TypeError: `ids` or `out` is not a tensor, or `threads` is not an integer.
        ValueError: `threads` is out of range.
    """
    check_kind("ids", ids, Tensor, "torch.as_tensor(ids)")
    if out is not None:
        check_kind("out", out, Tensor, "torch.empty of the rows' shape, or None")
    if threads is not None:
        check_integer("threads", threads, 1, THREADS_LIMIT, "None uses torch.get_num_threads()")
