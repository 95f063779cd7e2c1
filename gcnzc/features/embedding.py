"""Trainable embeddings in host memory: tables whose minibatches are gathered with gradients."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gcnzc.features.pinning import can_read_host
from gcnzc.kernels.embedding.duplicates import sum_duplicates
from gcnzc.kernels.embedding.initialize import fill_normal, fill_uniform
from gcnzc.kernels.gather import gather
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.arguments import (
    THREADS_LIMIT,
    as_ids,
    check_choice,
    check_device,
    check_integer,
    check_kind,
    check_number,
    check_seed,
    describe,
)
from gcnzc.system.array_file import read_arrays, read_shapes, write_arrays
from gcnzc.system.row_memory import (
    DTYPES,
    allocate,
    new_mapped_file,
    open_mapped_file,
)

_IDS_HINT = "ids of rows, such as those of a minibatch's nodes"


class EmbeddingTable:
    """A table of trainable embeddings in host memory, one row per node.

    Unlike `torch.nn.Embedding`, the table is not a parameter of a module. A minibatch gathers its
    rows, and the backward pass computes their gradients only. An optimizer such as
    `gcnzc.optim.SparseAdagrad` then updates these rows in place.

    A GPU reads the rows directly in a `with gcnzc.pinned(table.rows)` block. Outside of such a
    block the CPU gathers them, and they are copied to the GPU.

    Gather rows in the training step, not in a thread that prepares later minibatches: rows that are
    gathered before a step do not have its update.

    Args:
        num_rows: number of rows, N.
        num_columns: number of columns, D.
        dtype: torch.float32 or torch.float64.
        init: "normal", "uniform" or "zeros". Values depend on the seed, the row and the column, and
            not on the number of threads.
        scale: standard deviation of normal values; largest absolute value of uniform ones.
        seed: of 64 bits. Tables of one model need different seeds.
        path: a `.npy` file to create, which is memory-mapped. Updates change the file, so the table
            may be larger than the memory. None uses memory.
        threads: number of threads that initialize the rows. Default: `torch.get_num_threads()`.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is out of its range.
        RuntimeError: the memory is too small.
        FileExistsError: `path` exists; `open` maps it.
        OSError: the disk is full or not writable.
    """

    rows: Tensor
    """(N, D), on the host; contiguous"""

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        *,
        dtype: torch.dtype = torch.float32,
        init: Literal["normal", "uniform", "zeros"] = "normal",
        scale: float = 1.0,
        seed: int = 0,
        path: str | Path | None = None,
        threads: int | None = None,
    ) -> None:
        shape = check_integer("num_rows", num_rows, 0), check_integer("num_columns", num_columns, 1)
        check_kind("dtype", dtype, torch.dtype, "torch.float32 or torch.float64")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}\n\nhint: torch.float32 or torch.float64")
        check_choice("init", init, ("normal", "uniform", "zeros"))
        scale = check_number("scale", scale, lambda value: 0 <= value < torch.finfo(dtype).max / 8)
        seed = check_seed("seed", seed)
        _check_threads(threads)
        if path is None:
            rows = allocate(shape, dtype, "a table of embeddings")
            _initialize(rows, init, scale, seed, threads)
        else:
            with new_mapped_file(Path(path), shape, dtype) as rows:
                _initialize(rows, init, scale, seed, threads)
        self._set_rows(rows, is_trainable=True)

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False) -> "EmbeddingTable":
        """Memory-map a `.npy` file that a table with `path` has created.

        Args:
            path: of the file.
            read_only: open a table that is not trained: gathered rows require no gradient.
                Otherwise updates change the file.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: the file may not be written, and `read_only` is False.
            ValueError: the file has no such table.
        """
        rows = open_mapped_file(Path(path), read_only=read_only)
        if rows.ndim != 2 or not rows.shape[1]:
            raise ValueError(
                f"{path} has {describe(rows)}\n\nhint: a table of embeddings is (N, D)"
            )
        return cls._of(rows, is_trainable=not read_only)

    @classmethod
    def load(cls, path: str | Path, name: str = "rows") -> "EmbeddingTable":
        """Load a table from a file of `save`, or of the method `save` of its optimizer.

        Args:
            path: of the file.
            name: of the array: "rows" in files of `save`, and "TABLE/rows" in those of an optimizer
                of tables with names.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or has no such array.
            RuntimeError: the memory is too small.
        """
        path = Path(path)
        shapes = read_shapes(path)
        kinds = {kind: dtype for dtype, kind in DTYPES.items()}
        shape, kind = shapes.get(name, ((), None))
        if len(shape) != 2 or kind not in kinds:
            raise ValueError(
                f"{path} has no table {name!r}, but {', '.join(shapes) or 'none'}\n\n"
                'hint: load(path, "paper/rows") for the table "paper" of an optimizer'
            )
        rows = allocate(shape, kinds[kind], "a table of embeddings")
        read_arrays(path, {name: rows.numpy()})
        return cls._of(rows, is_trainable=True)

    @classmethod
    def _of(cls, rows: Tensor, *, is_trainable: bool) -> "EmbeddingTable":
        table = cls.__new__(cls)
        table._set_rows(rows, is_trainable=is_trainable)
        return table

    def _set_rows(self, rows: Tensor, *, is_trainable: bool) -> None:
        self.rows, self._is_trainable = rows, is_trainable
        self._num_gathers, self._lock = 0, ForkSafeLock()
        # gathered rows with a gradient that no optimizer has taken, by the number of the gather
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return self.rows.shape[0]

    @property
    def num_columns(self) -> int:
        """Number of columns, D."""
        return self.rows.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.rows.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel() * self.rows.element_size()

    @property
    def is_trainable(self) -> bool:
        """Whether gathered rows require a gradient; False if the table was opened read-only."""
        return self._is_trainable

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"EmbeddingTable({self.num_rows} x {self.num_columns} {self.dtype})"

    def gather(
        self,
        ids: Any,
        device: torch.device | str | int | None = None,
        *,
        threads: int | None = None,
    ) -> Tensor:
        """Gather rows `ids` into a (B, D) tensor that requires a gradient.

        Its attribute `grad` has the gradient after the backward pass. With `torch.no_grad()`, or if
        the table is not trainable, the rows require no gradient.

        Args:
            ids: (B,) int32 or int64 in [0, N): a tensor, an array or a list; may have duplicates.
            device: where the rows are needed. Default: the device of `ids`.
            threads: number of threads on the host. Default: `torch.get_num_threads()`.

        Returns:
            (B, D) on `device`.

        Raises:
            TypeError: `ids` or `device` has another type.
            ValueError: `ids` has another dtype or shape.
            IndexError: an id is outside [0, N). If a GPU reads the rows, the ids are checked as in
                `FeatureTable.gather`, and by the optimizer.
        """
        ids = as_ids("ids", ids, _IDS_HINT)
        _check_threads(threads)
        target = ids.device if device is None else check_device("device", device)
        rows = self.rows
        if target.type == "cuda" and rows.is_pinned() and can_read_host(target):
            found = gather(rows, ids.to(target))
        else:
            found = gather(rows, ids.cpu(), threads=threads).to(target)
        if self._is_trainable and torch.is_grad_enabled():
            found.requires_grad_()
            self._keep_gradient(ids, found)
        return found

    def _keep_gradient(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the pending ones when their gradient has been computed."""
        with self._lock:
            number = self._num_gathers = self._num_gathers + 1
        # the caller may change its ids after the gather
        own_ids, reference = ids.clone(), weakref.ref(self)

        def keep(leaf: Tensor) -> None:
            table = reference()
            if table is not None:
                table._pending[number] = (own_ids, leaf)

        rows.register_post_accumulate_grad_hook(keep)

    def take_gradients(self, *, threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows since the last call, and forget them.

        Gradients of the same row are added in the order of gathers, and of ids in a gather. The
        attribute `grad` of the gathered rows becomes None.

        Args:
            threads: number of threads. Default: `torch.get_num_threads()`.

        Returns:
            The different ids, (U,) int64, ascending, and the gradient of each, (U, D) of `dtype`,
            on the host.
        """
        pending = [self._pending.pop(number) for number in sorted(self._pending)]
        all_ids, gradients = [], []
        for ids, leaf in pending:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                all_ids.append(ids.cpu())
                gradients.append(gradient.detach().to("cpu", self.dtype))
        if not all_ids:
            return torch.empty(0, dtype=torch.int64), self.rows.new_empty(0, self.num_columns)
        own_ids = all_ids[0] if len(all_ids) == 1 else torch.cat(all_ids)
        own = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        return sum_duplicates(own_ids.contiguous(), own.contiguous(), threads=threads)

    def clear_gradients(self) -> None:
        """Forget the gradients since the last `take_gradients`."""
        for _, leaf in self._pending.values():
            leaf.grad = None
        self._pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the rows, which are not copied; for large tables see `save`."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the rows of a `state_dict` into the table.

        Raises:
            ValueError: it has no rows of the shape and dtype of the table.
        """
        rows = state_dict.get("rows")
        if not isinstance(rows, Tensor) or (rows.shape, rows.dtype) != (
            self.rows.shape,
            self.rows.dtype,
        ):
            raise ValueError(
                f"the state has {describe(rows)} as the rows of {self}\n\n"
                "hint: was it saved for another table?"
            )
        self.rows.copy_(rows)

    def save(self, path: str | Path) -> None:
        """Write the rows to a file atomically, with a checksum.

        The file is an uncompressed `.npz`, which `numpy.load` reads too. The table is not copied in
        memory.

        Args:
            path: of the file; its folder exists.

        Raises:
            OSError: the disk is full or not writable. The previous file remains.
        """
        write_arrays(Path(path), {"rows": self.rows.numpy()}, {})


def _initialize(rows: Tensor, init: str, scale: float, seed: int, threads: int | None) -> None:
    if init != "zeros":
        fill = fill_normal if init == "normal" else fill_uniform
        fill(rows, scale, seed, threads=threads)


def _check_threads(threads: int | None) -> None:
    if threads is not None:
        check_integer("threads", threads, 1, THREADS_LIMIT, "None uses torch.get_num_threads()")
