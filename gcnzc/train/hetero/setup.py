"""Give a run on a heterogeneous graph its trainable embeddings."""

from contextlib import ExitStack

from gcnzc.features.pinning import pinned
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.embeddings import TrainedEmbeddings, build_embeddings, check_optimizer
from gcnzc.train.tasks.hetero_link import HeteroLinkTask
from gcnzc.train.tasks.hetero_node import HeteroNodeTask
from gcnzc.train.trainer import Trainer


def open_embeddings(trainer: Trainer, stack: ExitStack) -> TrainedEmbeddings | None:
    """Build the embeddings of the node types without features that the model reads, if any.

    Args:
        trainer: the run.
        stack: for a GPU, their rows are page-locked until it is closed. The GPU has read the rows
            of a step before the optimizer, which needs their gradients, updates them.

    Raises:
        ValueError: an option does not support them.
        RuntimeError: the memory is too small.
    """
    data, task, config = trainer.data, trainer.task, trainer.config
    if not isinstance(data, HeteroDataset):
        return None
    assert isinstance(task, HeteroNodeTask | HeteroLinkTask), "`build_task` has built it"
    tables = build_embeddings(config, data, trainer.model)
    check_optimizer(config, trainer.optimizer, tables)
    task.embeddings = tables
    if not tables:
        return None
    if trainer.device.type == "cuda":
        for table in tables.values():
            stack.enter_context(pinned(table.rows))
    names = ", ".join(f"{name} ({len(table):,} rows)" for name, table in tables.items())
    trainer.reporter.say(f"embeddings of {config.embedding_dim} columns are trained for {names}")
    return TrainedEmbeddings(config, tables, trainer.group, trainer.folder)
