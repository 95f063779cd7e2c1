"""Trainable embeddings of a run, for node types without features: optimizer and files.

Each worker has a replica of every table in its memory. A checkpoint has a file with the rows and
the optimizer's state, and the best model one with the rows.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

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
from gcnzc.system.array_file import write_arrays
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.output_files import OutputFiles
from gcnzc.train.run_folder import best_rows, lost_best_remedy


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
    """

    def __init__(
        self, config: TrainConfig, tables: Mapping[str, EmbeddingTable], group: Group
    ) -> None:
        self.tables, chosen = dict(tables), config.model.embeddings
        self.optimizer: SparseAdagrad | SparseAdam = chosen.load()(
            self.tables, group, **chosen.given
        )
        self.group = group

    def step(self, weight: float) -> None:
        """Update the rows with gradients, together with the other workers.

        Args:
            weight: this worker's number of seeds, divided by the mean over the workers.
        """
        self.optimizer.weight = weight
        self.optimizer.step()

    def keep_best(self, files: OutputFiles, epoch: int) -> bool:
        """Write the rows of a new best model on worker 0; a collective call.

        Args:
            files: reports a file that cannot be written.
            epoch: counted from 0.

        Returns:
            Whether worker 0 has written them; True on the other workers.
        """
        arrays = {f"{name}/rows": table.rows.numpy() for name, table in self.tables.items()}
        path = best_rows(files.folder, epoch)
        with joint_work(self.group) as work:
            return self.group.rank != 0 or work.run_in_thread(
                lambda: files.attempt(
                    "best-*.npz", lambda: write_arrays(path, arrays, {"epoch": epoch})
                )
            )

    def load(self, path: Path, remedy: str) -> None:
        """Load the rows and the state of a checkpoint on all workers; a collective call.

        Raises:
            FileNotFoundError: the file does not exist on a worker.
            ValueError: the file is damaged, or of other tables.
        """
        with joint_work(self.group) as work:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, which has the embeddings of the checkpoint\n\n"
                    f"hint: {remedy}"
                )
            try:
                work.run_in_thread(lambda: self.optimizer.load(path))
            except ValueError as error:
                raise ValueError(f"{_cause_of(error)}\n\nhint: {remedy}") from error


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
            data.graph.nodes(name).num_nodes,
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
    path, remedy = best_rows(run, epoch), lost_best_remedy(run)
    if names and not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, which has the embeddings of the best model\n\nhint: {remedy}"
        )
    try:
        tables = {name: EmbeddingTable.load(path, f"{name}/rows") for name in names}
    except ValueError as error:
        raise ValueError(f"{_cause_of(error)}\n\nhint: {remedy}") from error
    for name, table in tables.items():
        num_nodes = data.graph.nodes(name).num_nodes
        if len(table) != num_nodes:
            raise ValueError(
                f"{data.folder} has {num_nodes:,} nodes of type {name!r}, but the "
                f"model has embeddings of {len(table):,}\n\n"
                "hint: embeddings are of the nodes of the graph that the model was trained on"
            )
    return tables


def _cause_of(error: Exception) -> str:
    """Return an error's message without its hint."""
    return str(error).partition("\n\n")[0]


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
