"""Trainable embeddings of a run, for node types without features: optimizer and files.

Each worker has a replica of every table in its memory. The files are in the folder `embeddings` of
the run: one with the rows and the optimizer's state for the last checkpoint, and one with the rows
of the best model.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from gcnzc.exchange import Group
from gcnzc.exchange.long_work import joint_work
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.models.hetero import HeteroModel
from gcnzc.optim import (
    DistributedOptimizer,
    DropCompute,
    LocalMethod,
    SparseAdagrad,
    SparseAdam,
)
from gcnzc.system.array_file import verify_arrays, write_arrays
from gcnzc.train.checkpoint import RESTORE
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.output_files import OutputFiles

FOLDER = "embeddings"


def adagrad(
    tables: Mapping[str, EmbeddingTable], group: Group, *, dim: int = 64, lr: float = 0.01
) -> SparseAdagrad:
    """Adagrad for the embeddings of the nodes of a step.

    Args:
        dim: columns of the embeddings, which are in host memory.
        lr: learning rate, which is constant.
    """
    return SparseAdagrad(tables, lr=lr, group=group)


def lazy_adam(
    tables: Mapping[str, EmbeddingTable], group: Group, *, dim: int = 64, lr: float = 0.01
) -> SparseAdam:
    """Adam that updates the embeddings of the nodes of a step, and leaves the others.

    Args:
        dim: columns of the embeddings, which are in host memory.
        lr: learning rate, which is constant.
    """
    return SparseAdam(tables, lr=lr, group=group)


class TrainedEmbeddings:
    """The tables of a run, the optimizer that updates their rows, and their files.

    Args:
        config: options of the run.
        tables: by node type.
        group: all workers.
        folder: the run folder.
    """

    def __init__(
        self, config: TrainConfig, tables: Mapping[str, EmbeddingTable], group: Group, folder: Path
    ) -> None:
        self.tables, chosen = dict(tables), config.model.embeddings
        self.optimizer: SparseAdagrad | SparseAdam = chosen.load()(
            self.tables, group, **chosen.given
        )
        self.group, self.folder = group, folder / FOLDER
        self.generation = 0
        """generation of the state that was written last"""
        # names of the files that checkpoints refer to: the last one that is on the disk, and the
        # one that was begun last
        self._on_disk: frozenset[str] = frozenset()
        self._begun: frozenset[str] = frozenset()

    def clear_gradients(self) -> None:
        """Forget all gradients of rows."""
        self.optimizer.zero_grad()

    def step(self, weight: float) -> None:
        """Update the rows with gradients, together with the other workers.

        Args:
            weight: this worker's number of seeds, divided by the mean over the workers.
        """
        self.optimizer.weight = weight
        self.optimizer.step()

    def keep_best(self, files: OutputFiles, epoch: int) -> None:
        """Write the rows of a new best model on worker 0; a collective call.

        Args:
            files: reports a file that cannot be written.
            epoch: counted from 0.
        """
        with joint_work(self.group):
            if self.group.rank == 0:
                files.attempt("embeddings/best", lambda: self.write_best(epoch))

    def write_best(self, epoch: int) -> None:
        """Write the rows of the best model, of an epoch counted from 0; on worker 0.

        Raises:
            OSError: the file could not be written.
        """
        self.folder.mkdir(exist_ok=True)
        arrays = {f"{name}/rows": table.rows.numpy() for name, table in self.tables.items()}
        write_arrays(self.folder / best_name(epoch), arrays, {"epoch": epoch})

    def write_state(self, best: Mapping[str, Any], is_written: bool) -> None:
        """Write the next generation of the rows and the state; on worker 0.

        Files are removed to which neither the next checkpoint refers, nor the last one on the disk.

        Args:
            best: the best model, to which the next checkpoint refers too.
            is_written: whether the checkpoint after the last call is on the disk.

        Raises:
            OSError: the file could not be written.
        """
        if is_written:
            self._on_disk = self._begun
        self.folder.mkdir(exist_ok=True)
        generation = self.generation + 1
        self.optimizer.save(self.folder / _state_name(generation))
        self.generation = generation
        self._begun = frozenset({_state_name(generation)} | _best_names(best))
        self._remove_except(self._on_disk | self._begun)

    def remove_old(self, best: Mapping[str, Any]) -> None:
        """Remove the files of earlier checkpoints and models.

        Call it after the last ones are written.

        Args:
            best: the best model.
        """
        self._on_disk = self._begun
        self._remove_except(self._begun | _best_names(best))

    def _remove_except(self, names: Collection[str]) -> None:
        for path in self.folder.glob("*.npz"):
            if path.name not in names:
                # a file that is left on a read-only disk does no harm
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def restore(self, generation: int, best: Mapping[str, Any]) -> None:
        """Load a generation of the rows and the state on all workers; a collective call.

        Raises:
            FileNotFoundError: the file does not exist on a worker.
            ValueError: the file is damaged, or of other tables.
        """
        path = self.folder / _state_name(generation)
        with joint_work(self.group):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, which has the embeddings of the checkpoint\n\n"
                    f"{RESTORE}; with several machines, put the run folder on a file system "
                    "that they share"
                )
            try:
                self.optimizer.load(path)
            except ValueError as error:
                raise ValueError(f"{_cause_of(error)}\n\n{RESTORE}") from error
        self.generation = generation
        self._on_disk = self._begun = frozenset({path.name} | _best_names(best))

    def describe_lost_best(self, best: Mapping[str, Any]) -> str | None:
        """Return a warning if the file of the best model's rows is missing or damaged."""
        for name in _best_names(best):
            try:
                verify_arrays(self.folder / name)
            except (OSError, ValueError) as error:
                return (
                    f"the embeddings of the best model, of epoch {best['epoch'] + 1}, are lost: "
                    f"{_cause_of(error)}; no best model can be evaluated until an epoch is better"
                )
        return None


def best_name(epoch: int) -> str:
    """Return the name of the file with the rows of the best model, of an epoch counted from 0."""
    return f"best-{epoch:06}.npz"


def _best_names(best: Mapping[str, Any]) -> set[str]:
    return {best_name(best["epoch"])} if best else set()


def _state_name(generation: int) -> str:
    return f"state-{generation:06}.npz"


def embedded_types(model: nn.Module, data: HeteroDataset) -> list[str]:
    """Return the node types whose rows a model reads, and which have no features."""
    encoder = next(part for part in model.modules() if isinstance(part, HeteroModel))
    read = [encoder.metadata.node_types[t] for t in encoder.in_types]
    return [name for name in read if name not in data.table.tables]


def build_embeddings(
    config: TrainConfig, data: HeteroDataset, model: nn.Module
) -> dict[str, EmbeddingTable]:
    """Build the tables of the node types without features, the same on all workers.

    Raises:
        RuntimeError: the memory is too small.
    """
    names, dim = embedded_types(model, data), config.model.embeddings["dim"]
    return {
        name: EmbeddingTable(
            data.graph.num_nodes(name),
            dim,
            scale=dim**-0.5,
            seed=mixed_seed(config.loading.seed, data.graph.node_types.index(name)),
        )
        for name in names
    }


def load_embeddings(
    run: Path, epoch: int, names: Collection[str], data: HeteroDataset
) -> dict[str, EmbeddingTable]:
    """Load the tables of the best model of a run.

    Args:
        run: the run folder.
        epoch: of the best model, counted from 0.
        names: node types.
        data: the graph to evaluate.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or has other tables, or the graph has other nodes.
    """
    path = run / FOLDER / best_name(epoch)
    if names and not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, which has the embeddings of the best model\n\n{_restore_best(run)}"
        )
    try:
        tables = {name: EmbeddingTable.load(path, f"{name}/rows") for name in names}
    except ValueError as error:
        raise ValueError(f"{_cause_of(error)}\n\n{_restore_best(run)}") from error
    for name, table in tables.items():
        if len(table) != data.graph.num_nodes(name):
            raise ValueError(
                f"{data.folder} has {data.graph.num_nodes(name):,} nodes of type {name!r}, but the "
                f"model has embeddings of {len(table):,}\n\n"
                "hint: embeddings are of the nodes of the graph that the model was trained on"
            )
    return tables


def _cause_of(error: Exception) -> str:
    """Return an error's message without its hint."""
    return str(error).partition("\n\n")[0]


def _restore_best(run: Path) -> str:
    return (
        "hint: restore the file from a copy; otherwise start the run again, since "
        f"`gcnzc train --resume {run} --epochs N` writes another only if a later epoch is better"
    )


def check_optimizer(
    config: TrainConfig, optimizer: DistributedOptimizer, names: Collection[str]
) -> None:
    """Check that the optimizer of a run supports trainable embeddings.

    Raises:
        ValueError: it does not.
    """
    if not names:
        return
    strategy = config.run.strategy.name
    which = f"node type {', '.join(names)} without features has trainable embeddings"
    if isinstance(optimizer, DropCompute):
        raise ValueError(
            f"--strategy {strategy}: {which}, which this strategy does not support\n\n"
            "hint: omit --strategy, or give the node type features"
        )
    if isinstance(optimizer, LocalMethod) and optimizer.group.world_size > 1:
        raise ValueError(
            f"--strategy {strategy} with {optimizer.group.world_size} workers: {which}, which "
            "the workers exchange in each step\n\n"
            "hint: omit --strategy, use one worker, or give the node type features"
        )
    if config.training.precision == "fp16":
        raise ValueError(
            f"--precision fp16: {which}, whose gradients are not scaled\n\n"
            "hint: use --precision bf16"
        )
