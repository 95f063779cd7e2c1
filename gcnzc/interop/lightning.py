"""A `LightningDataModule` with gcnzc's loaders.

Lightning asks for loaders, hands their batches to the model, and keeps their state in its
checkpoints, so that a run goes on within an epoch. Batches are `gcnzc.Batch`.

Importing this imports Lightning, under whichever of its two names is there or in use.
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
from gcnzc.interop.turns import Turns
from gcnzc.loader.loader import Loader
from gcnzc.sampling.batch import Batch

NAMES = ("lightning.pytorch", "pytorch_lightning")
INSTALL = "pip install lightning"


def import_lightning() -> Any:
    """The module `lightning.pytorch` or `pytorch_lightning`: the one that is in use, or is there.

    What Lightning warns of while it is imported is not shown.

    Raises:
        RuntimeError: there is neither.
    """
    there = [name for name in NAMES if find_spec(name.partition(".")[0]) is not None]
    if not there:
        raise RuntimeError(f"Lightning is not installed\n\nhint: {INSTALL}")
    in_use = [name for name in there if name in sys.modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module((in_use or there)[0])


class Feed:
    """A loader as Lightning iterates over it: as many batches as it has, and then the next epoch.

    Lightning may stop before the last batch, and never asks for one more after it.

    Args:
        loader: of batches.
        advances: every iteration is another epoch; else all are the first, so that validations
            draw the same neighbours and compare.
    """

    def __init__(self, loader: Loader, advances: bool) -> None:
        self.loader, self._advances = loader, advances
        self._turns = Turns(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if not self._advances:
            self._turns.set_epoch(0)
        return self._turns.begin()

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; see `gcnzc.Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration where `state` was taken.

        Raises:
            ValueError: as `gcnzc.Loader.load_state_dict` does.
        """
        self._turns.load_state_dict(state)


class DataModule(import_lightning().LightningDataModule):  # type: ignore[misc]
    """Batches of a dataset for Lightning's Trainer: `trainer.fit(model, datamodule=module)`.

    The loaders follow the trainer: batches come on its device, and each of its workers takes its
    share. On a GPU features are page-locked and read in place, from `setup` to `teardown`; a copy
    that this takes, as `gcnzc.pinned` says, is each rank's own. Without a trainer batches stay on
    the host.

    A batch has as many samples as it has seeds; tell Lightning so where it averages:
    `self.log(..., batch_size=len(batch.seeds))`.

    Args:
        data: with a split into "train", "valid" and "test".
        fanouts: neighbours kept at each layer, input layer first; -1 keeps all.
        batch_size: seeds of a batch of one worker.
        eval_fanouts: for validation, test and prediction; as `fanouts` if None.
        predict_nodes: (P,) ids that `trainer.predict` goes over; all nodes if None.
        seed: orders the seeds and draws the neighbours; an integer of 64 bits.
        threads, ahead: as of `gcnzc.Loader`.

    Raises:
        ValueError: the dataset has no features.
        RuntimeError: there is no Lightning, on import.
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
        """Page-lock the features, if the trainer works on a GPU; Lightning calls this."""
        self._locks.close()
        if self._device().type == "cuda":
            assert self.data.table is not None, "looked at before"
            self._table = self._locks.enter_context(pinned(self.data.table))

    def teardown(self, stage: str) -> None:
        """Let go of the features; Lightning calls this."""
        self._train, self._table = None, self.data.table
        self._locks.close()

    def train_dataloader(self) -> Feed:
        """Batches of the training nodes, in another order every epoch."""
        if self._train is None:
            self._train = self._feed(self.data.split["train"], self.fanouts, shuffle=True)
            if self._state is not None:
                self._train.load_state_dict(self._state)
                self._state = None
        return self._train

    def val_dataloader(self) -> Feed:
        """Batches of the validation nodes, the same every time."""
        return self._feed(self.data.split["valid"], self.eval_fanouts, shuffle=False)

    def test_dataloader(self) -> Feed:
        """Batches of the test nodes, the same every time."""
        return self._feed(self.data.split["test"], self.eval_fanouts, shuffle=False)

    def predict_dataloader(self) -> Feed:
        """Batches of the nodes to predict, in their order."""
        nodes = self.predict_nodes
        if nodes is None:
            nodes = torch.arange(self.data.graph.num_nodes)
        return self._feed(nodes, self.eval_fanouts, shuffle=False)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """The batch as it is, for the loader put it there; Lightning calls this."""
        if isinstance(batch, Batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, int]:
        """Where training stands, for a checkpoint; empty before it began."""
        return {} if self._train is None else self._train.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let training go on where the state was taken."""
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
