"""Training tasks: node classification and link prediction."""

from collections.abc import Callable, Mapping

from gcnzc.graph.dataset import Dataset
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.tasks.base import Task
from gcnzc.train.tasks.hetero_link import HeteroLinkTask
from gcnzc.train.tasks.hetero_node import HeteroNodeTask
from gcnzc.train.tasks.link import LinkTask
from gcnzc.train.tasks.node import NodeTask

_KINDS: Mapping[tuple[str, bool], Callable[..., Task]] = {
    ("node", False): NodeTask,
    ("node", True): HeteroNodeTask,
    ("link", False): LinkTask,
    ("link", True): HeteroLinkTask,
}


def build_task(config: TrainConfig, data: Dataset | HeteroDataset) -> Task:
    """Build the training task that `config` selects, for the graph `data`.

    Raises:
        ValueError: the graph has no labels, or no split of its edges, for the task.
    """
    task = config.graph.task
    return _KINDS[task.name, isinstance(data, HeteroDataset)](config, data, **task.options)
