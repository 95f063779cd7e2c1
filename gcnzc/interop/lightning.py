"""A `LightningDataModule` with gcnzc's loaders.

Lightning's checkpoints contain the state of the loaders, so that a run can resume within an epoch.
Batches are `gcnzc.Batch`.

Importing this module imports Lightning, as `lightning.pytorch` or `pytorch_lightning`, whichever is
in use or installed.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.loader import Loader
from gcnzc.sampling.batch import Batch

NAMES = ("lightning.pytorch", "pytorch_lightning")
INSTALL = "pip install lightning"


def import_lightning() -> Any:
    """Import `lightning.pytorch` or `pytorch_lightning`, whichever is in use or installed.

    Warnings during the import are suppressed.

    Raises:
        ImportError: neither is installed.
    """
    installed = [name for name in NAMES if find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError(f"Lightning is not installed\n\nhint: {INSTALL}")
    in_use = [name for name in installed if name in sys.modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module((in_use or installed)[0])


class Feed:
    """Iterable over a loader, of which each iteration is the next epoch, for Lightning.

    `gcnzc.Loader` repeats an epoch that was stopped early. Lightning may stop an iteration before
    the last batch, and does not request one after it.

    Args:
        loader: a loader over which nothing else iterates.
        advances: each iteration is the next epoch; if False, each is the first epoch, so that
            validations sample the same neighbours.
    """

    def __init__(self, loader: Loader, advances: bool) -> None:
        self.loader, self._advances = loader, advances
        # epoch and position at which the last iteration began
        self._begun: tuple[int, int] | None = None
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        loader = self.loader
        if not self._advances:
            self.set_epoch(0)
        now = self._now()
        if self._begun == now:
            # the last iteration yielded no batch
            loader.load_state_dict(loader.state_dict())
        elif self._is_over(now):
            loader.set_epoch(now[0] + 1)
        self._begun, self._is_loaded = self._now(), False
        return iter(loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which resumes a loaded state of that epoch.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        if not self._is_loaded:
            # set another epoch first, since setting the current epoch keeps the position
            self.loader.set_epoch(0 if self.loader.epoch else 1)
        self.loader.set_epoch(epoch)
        self._begun = None

    def state_dict(self) -> dict[str, int]:
        """Return the position of the loader; see `gcnzc.Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the next iteration at the position of `state`.

        Raises:
            ValueError: see `gcnzc.Loader.load_state_dict`.
        """
        self.loader.load_state_dict(state)
        self._begun, self._is_loaded = None, True

    def _is_over(self, now: tuple[int, int]) -> bool:
        if self._begun is None:
            return self._is_loaded and now[1] == len(self.loader)
        return self._begun[0] == now[0]

    def _now(self) -> tuple[int, int]:
        state = self.loader.state_dict()
        return state["epoch"], state["position"]


class DataModule(import_lightning().LightningDataModule):  # type: ignore[misc]
    """Batches of a dataset for Lightning's Trainer: `trainer.fit(model, datamodule=module)`.

    Batches are on the trainer's device, and its ranks share the seeds. On a GPU the features are
    page-locked and read in place, from `setup` to `teardown`; if `gcnzc.pinned` has to copy them,
    each rank makes a copy of its own. Without a trainer, batches are on the host.

    The batch size that Lightning needs for averages is the number of seeds:
    `self.log(..., batch_size=len(batch.seeds))`.

    Args:
        data: a dataset with a split into "train", "valid" and "test".
        fanouts: number of sampled neighbours at each layer, input layer first; -1 for all.
        batch_size: number of seeds in a batch of one rank.
        eval_fanouts: for validation, test and prediction. Default: `fanouts`.
        predict_nodes: (P,) node ids for `trainer.predict`. Default: all nodes.
        seed: random seed of the shuffling and the sampling; a 64-bit integer.
        threads, ahead: see `gcnzc.Loader`.

    Raises:
        ValueError: the dataset has no features.
        ImportError: Lightning is not installed; raised on import.
    """

    def __init__(
        self,
        data: Dataset,
        fanouts: Sequence[int],
        batch_size: int = 1024,
        *,
        eval_fanouts: Sequence[int] | None = None,
        predict_nodes: Tensor | None = None,
        seed: int = 0,
        threads: int | None = None,
        ahead: int | None = None,
    ) -> None:
        super().__init__()
        if data.table is None:
            raise ValueError(
                f"{data.name} has no features\n\nhint: gcnzc prepare SOURCE DEST --features ..."
            )
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.fanouts = tuple(fanouts)
        self.eval_fanouts = self.fanouts if eval_fanouts is None else tuple(eval_fanouts)
        self.predict_nodes = predict_nodes
        self._threads, self._ahead = threads, ahead
        self._table: FeatureTable | None = data.table
        self._locks = ExitStack()
        self._train: Feed | None = None
        self._state: dict[str, int] | None = None

    def setup(self, stage: str) -> None:
        """Page-lock the features, if the trainer uses a GPU; called by Lightning."""
        self._locks.close()
        if self._device().type == "cuda":
            assert self.data.table is not None, "checked by the constructor"
            self._table = self._locks.enter_context(pinned(self.data.table))

    def teardown(self, stage: str) -> None:
        """Unlock the features; called by Lightning."""
        self._train, self._table = None, self.data.table
        self._locks.close()

    def train_dataloader(self) -> Feed:
        """Return batches of the training nodes, in another order each epoch."""
        if self._train is None:
            self._train = self._feed(self.data.split["train"], self.fanouts, shuffle=True)
            if self._state is not None:
                self._train.load_state_dict(self._state)
                self._state = None
        return self._train

    def val_dataloader(self) -> Feed:
        """Return batches of the validation nodes, the same in each iteration."""
        return self._feed(self.data.split["valid"], self.eval_fanouts, shuffle=False)

    def test_dataloader(self) -> Feed:
        """Return batches of the test nodes, the same in each iteration."""
        return self._feed(self.data.split["test"], self.eval_fanouts, shuffle=False)

    def predict_dataloader(self) -> Feed:
        """Return batches of the nodes to predict, in their order."""
        nodes = self.predict_nodes
        if nodes is None:
            nodes = torch.arange(self.data.graph.num_nodes)
        return self._feed(nodes, self.eval_fanouts, shuffle=False)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return the batch, which the loader has copied to the device; called by Lightning."""
        if isinstance(batch, Batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, int]:
        """Return the position of training for a checkpoint; empty before training."""
        return {} if self._train is None else self._train.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume training at the position of `state_dict`."""
        self._state = state_dict
        if self._train is not None:
            self._train.load_state_dict(state_dict)

    def _feed(self, nodes: Tensor, fanouts: Sequence[int], shuffle: bool) -> Feed:
        trainer = self.trainer
        loader = Loader(
            self.data.graph,
            self._table,
            nodes,
            fanouts,
            self.batch_size,
            labels=self.data.labels,
            device=self._device(),
            shuffle=shuffle,
            seed=self.seed,
            rank=0 if trainer is None else trainer.global_rank,
            world_size=1 if trainer is None else trainer.world_size,
            threads=self._threads,
            ahead=self._ahead,
        )
        return Feed(loader, advances=shuffle)

    def _device(self) -> torch.device:
        trainer = self.trainer
        return torch.device("cpu") if trainer is None else trainer.strategy.root_device
