"""The base class of optimizers of trainable embeddings.

Each rank has a replica of every table. In a step, the ranks exchange the gradients of the rows that
their minibatches use, and each rank applies the same update to these rows, so that the replicas
stay equal bit for bit.
"""

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from gcnzc.compress.reducer import describe_non_finite
from gcnzc.exchange import Algorithm, Caller, Group, current_group
from gcnzc.exchange.engine import hash_lines
from gcnzc.exchange.sync import check_same
from gcnzc.optim.embedding.row_exchange import RowGradients, exchange_counts, mean_of_rows
from gcnzc.optim.group_options import OPTIMIZER, STEPS, option_lines
from gcnzc.optim.method import CommunicatingOptimizer
from gcnzc.optim.validation import check_group, check_options
from gcnzc.system.arguments import THREADS_LIMIT, check_integer, describe
from gcnzc.system.array_file import read_arrays, read_meta, write_arrays
from gcnzc.system.row_memory import allocate, check_writable, new_mapped_file

# rows of a table whose values are compared between ranks before the first step
SAMPLED_ROWS = 1024


class RowTable(Protocol):
    """A table of rows that an optimizer updates, such as `gcnzc.features.EmbeddingTable`."""

    rows: Tensor

    @property
    def is_trainable(self) -> bool:
        """Whether the rows may be updated."""

    def take_gradients(self, *, threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ids and gradients of rows since the last call, and forget them."""

    def clear_gradients(self) -> None:
        """Forget the gradients since the last `take_gradients`."""


Tables: TypeAlias = RowTable | Mapping[str, RowTable]
Values: TypeAlias = Mapping[str, Any]


class RowOptimizer(CommunicatingOptimizer):
    """The base class of `SparseAdam`, `SparseAdagrad` and `SparseSGD`.

    It is an optimizer of torch, so that torch's schedulers change its learning rate. Its step
    updates the rows that have gradients, and no other rows; its state is in host memory, one
    element for each element of a table. On W ranks, the update uses the mean gradient over the
    ranks, where a rank without a gradient of a row counts as zero. Rows and states have the same
    bits for any number of threads, and on all ranks. If a gradient is not finite, or its square
    would overflow, on any rank, all ranks skip the step.

    With torch's GradScaler, set `weight` to 1 / scaler.get_scale() before each step.

    Args:
        tables: a table, or tables by name, the same on all ranks.
        defaults: the options of the parameter group.
        group: the ranks that communicate; those of torch.distributed's default process group if
            None.
        threads: number of threads. Default: `torch.get_num_threads()`.
        state_folder: a folder for files of the state, which are memory-mapped, so that the state
            may be larger than the memory. None uses memory.

    Raises:
        TypeError: an argument has another type.
        ValueError: an option is out of its range, there is no table, or a table is read-only.
        RuntimeError: the memory is too small for the state.
        FileExistsError: `state_folder` has files of a state.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """names of the tensors of the state"""

    def __init__(
        self,
        tables: Tables,
        defaults: dict[str, Any],
        *,
        group: Group | None = None,
        threads: int | None = None,
        state_folder: str | Path | None = None,
    ) -> None:
        self.tables = _named(tables)
        """the tables by name; a single table has the empty name"""
        if group is not None:
            check_group(group)
        if threads is not None:
            check_integer("threads", threads, 1, THREADS_LIMIT)
        check_options(defaults, defaults)
        self.group = current_group() if group is None else group
        self.threads = threads
        self.steps = 0
        """number of steps taken, equal on all ranks"""
        self.skipped = 0
        """number of steps that were skipped because a gradient was not finite or too large"""
        self.skip_reason = ""
        """why the last `step` was skipped; empty if it was not"""
        self._is_compared = False
        super().__init__([table.rows for table in self.tables.values()], defaults)
        self.identity = self.group.new_caller(self.name)
        for number, (name, table) in enumerate(self.tables.items()):
            self._allocate_state(number, name, table, state_folder)

    def _allocate_state(
        self, number: int, name: str, table: RowTable, folder: str | Path | None
    ) -> None:
        rows = table.rows
        state: dict[str, Any] = {"step": 0}
        for state_name in self.state_names:
            if folder is None:
                what = f"the state {state_name} of {_describe(name)}"
                state[state_name] = allocate(rows.shape, rows.dtype, what)
                self.initialize(state[state_name])
                continue
            # by number: a name may have characters that file names do not have
            path = Path(folder) / f"table{number}-{state_name}.npy"
            with new_mapped_file(path, rows.shape, rows.dtype) as state[state_name]:
                self.initialize(state[state_name])
        self.state[rows] = state

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all tables."""
        states = self.state.values()
        return sum(state[name].nbytes for state in states for name in self.state_names)

    def initialize(self, state: Tensor) -> None:
        """Set the initial values of a tensor of the state, which has zeros."""

    @abstractmethod
    def update(self, rows: Tensor, state: Values, mean: RowGradients, options: Values) -> None:
        """Update rows and their state in place.

        Args:
            rows: of the table.
            state: of the table; `step` is the number of this step, from 1.
            mean: the mean gradients of rows.
            options: of the parameter group.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that the tables have."""
        for table in self.tables.values():
            table.clear_gradients()

    def algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `step`, which `step` and `lockstep` run."""
        caller_before = yield Caller(self.identity)
        world_size = self.group.world_size
        if world_size > 1 and not self._is_compared:
            yield from check_same(self._lines())
            self._is_compared = True
        gradients = [self._take(name, table) for name, table in self.tables.items()]
        options_hash = hash_lines(
            [str(self.steps), *option_lines(self.param_groups, with_gpu=True)]
        )
        counts = yield from exchange_counts(gradients, options_hash, world_size)
        hashes, bad, *num_rows = counts.T.tolist()
        if len(set(hashes)) > 1:
            yield from check_same(self._lines())
        self.skip_reason = describe_non_finite(bad) if any(bad) else ""
        if self.skip_reason:
            self.skipped += 1
            yield Caller(caller_before)
            return
        means = []
        for own, each in zip(gradients, num_rows, strict=True):
            means.append((yield from mean_of_rows(own, each, threads=self.threads)))
        # after the last exchange: if a rank is lost before, no table of this rank has changed
        for table, mean in zip(self.tables.values(), means, strict=True):
            if len(mean.ids):
                state = self.state[table.rows]
                state["step"] += 1
                self.update(table.rows, state, mean, self.param_groups[0])
        self.steps += 1
        yield Caller(caller_before)

    def _take(self, name: str, table: RowTable) -> RowGradients:
        ids, values = table.take_gradients(threads=self.threads)
        if self.weight != 1.0:
            values = values * self.weight
        gradients = RowGradients(ids, values, len(table.rows))
        gradients.check_ids(_describe(name))
        return gradients

    def _lines(self) -> list[str]:
        """Return the lines that must be the same on all ranks."""
        lines = [
            f"{OPTIMIZER}\t{self.identity}",
            f"{STEPS}\t{self.steps}",
            *option_lines(self.param_groups, with_gpu=True),
        ]
        for name, table in self.tables.items():
            rows = table.rows
            sampled = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
            digest = zlib.crc32(sampled.contiguous().numpy().data)
            lines.append(
                f"{_describe(name)}\t{tuple(rows.shape)} {rows.dtype}, step "
                f"{self.state[rows]['step']}, CRC-32 of some rows {digest:08x}"
            )
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the layout of torch's optimizers; tensors are not copied.

        It is the same on all ranks, and does not have the rows. For large tables see `save`.
        """
        return {
            **super().state_dict(),
            "optimizer": self.name,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a `state_dict`, of any number of ranks, into the state.

        Raises:
            ValueError: it is of another optimizer or other tables, or an option is out of its
                range. Nothing is loaded then.
        """
        saved = [each for _, each in sorted(state_dict["state"].items())]
        steps = [each["step"] for each in saved]
        options = self._check(state_dict, state_dict["param_groups"][0], steps, "the state")
        pairs = []
        for (name, table), found in zip(self.tables.items(), saved, strict=True):
            for state_name in self.state_names:
                own, value = self.state[table.rows][state_name], found[state_name]
                if (value.shape, value.dtype) != (own.shape, own.dtype):
                    raise ValueError(
                        f"{state_name} of {_describe(name)} is {describe(value)} in the state, not "
                        f"{describe(own)}\n\nhint: was it saved for other tables?"
                    )
                pairs.append((own, value))
        for own, value in pairs:
            own.copy_(value)
        self._restore(options, state_dict, steps)

    def save(self, path: str | Path) -> None:
        """Write the rows and the state of all tables to a file, atomically, with checksums.

        One rank is sufficient, since all have the same. The file is an uncompressed `.npz`, which
        `numpy.load` reads too, with arrays such as "paper/rows" and "paper/sum" for a table
        "paper", or "rows" and "sum" for a table without a name. Nothing is copied in memory. If the
        process is killed, the previous file remains.

        Args:
            path: of the file; its folder exists.

        Raises:
            OSError: the disk is full or not writable. The previous file remains.
        """
        options = {
            # a scheduler may have replaced a number by a tensor
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in self.param_groups[0].items()
            if name != "params"
        }
        meta = {
            "optimizer": self.name,
            "steps": self.steps,
            "skipped": self.skipped,
            "options": options,
            "table_steps": [self.state[table.rows]["step"] for table in self.tables.values()],
        }
        write_arrays(Path(path), self._arrays(), meta)

    def load(self, path: str | Path) -> None:
        """Load the rows and the state of all tables from a file of `save`, of any number of ranks.

        The file is read twice, first to verify its checksums.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or is of another optimizer or other tables. Nothing is
                loaded then.
        """
        path = Path(path)
        meta = read_meta(path)
        options = self._check(meta, meta["options"], meta["table_steps"], str(path))
        read_arrays(path, self._arrays())
        self._restore(options, meta, meta["table_steps"])

    def _check(
        self, meta: Values, options: Values, steps: Sequence[int], where: str
    ) -> dict[str, Any]:
        """Check that a state is of this optimizer, and return its options."""
        if meta.get("optimizer") != self.name:
            raise ValueError(
                f"{where} is of {meta.get('optimizer')}, not of {self.name}\n\nhint: load it with "
                "the optimizer that saved it"
            )
        if len(steps) != len(self.tables):
            raise ValueError(
                f"{where} has {len(steps)} tables, but {self.name} has {len(self.tables)}\n\nhint: "
                "was it saved for other tables?"
            )
        found = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
            if name != "params"
        }
        check_options(found, self.defaults, f" of {where}")
        return found

    def _restore(self, options: dict[str, Any], meta: Values, steps: Sequence[int]) -> None:
        self.param_groups[0].update(options)
        for table, step in zip(self.tables.values(), steps, strict=True):
            self.state[table.rows]["step"] = int(step)
        self.steps, self.skipped = int(meta["steps"]), int(meta["skipped"])
        self.zero_grad()
        self._is_compared = False

    def _arrays(self) -> dict[str, Any]:
        arrays = {}
        for name, table in self.tables.items():
            front = f"{name}/" if name else ""
            arrays[f"{front}rows"] = table.rows.numpy()
            for state_name in self.state_names:
                arrays[f"{front}{state_name}"] = self.state[table.rows][state_name].numpy()
        return arrays


def _named(tables: Tables) -> dict[str, RowTable]:
    named = dict(tables) if isinstance(tables, Mapping) else {"": tables}
    if not named:
        raise ValueError(
            "tables is empty\n\nhint: give a gcnzc.features.EmbeddingTable, or several"
        )
    for name, table in named.items():
        if not table.is_trainable:
            raise ValueError(
                f"{_describe(name)} is read-only\n\nhint: EmbeddingTable.open(path) opens a file "
                "whose rows are trained"
            )
        check_writable(table.rows, _describe(name))
    addresses = {id(table.rows) for table in named.values()}
    if len(addresses) < len(named):
        raise ValueError(f"two of {', '.join(named)} are one table\n\nhint: give each table once")
    return named


def _describe(name: str) -> str:
    return f"table {name!r}" if name else "the table"
