"""Training tasks: node classification and link prediction."""

from collections.abc import Callable, Mapping

from gcnzc.graph.dataset import Dataset
from gcnzc.train.config import TrainConfig
from gcnzc.train.tasks.base import Task
from gcnzc.train.tasks.link import LinkTask
from gcnzc.train.tasks.node import NodeTask


def build_task(config: TrainConfig, data: Dataset) -> Task:
    """What `config` says is to be learned from `data`.

    Raises:
        ValueError: `data` has nothing of the kind.
    """
    kinds: Mapping[str, Callable[[TrainConfig, Dataset], Task]] = {
        "node": NodeTask,
        "link": LinkTask,
    }
    return kinds[config.task](config, data)
