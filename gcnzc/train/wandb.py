"""Log runs to Weights & Biases: `gcnzc train --callback gcnzc.train.wandb:WandB`.

It needs the extra `wandb`. The environment of wandb applies, such as WANDB_PROJECT, WANDB_NAME, and
WANDB_MODE=offline.
"""

import os
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from gcnzc.train.callbacks import Callback
from gcnzc.train.state import Run


class WandB(Callback):
    """Logs the options of a run, the numbers of its record, and the epoch of its best model.

    A resumed run continues the one at Weights & Biases.

    Args:
        settings: arguments of `wandb.init`, such as `project`, by default "gcnzc", or `name`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.id = settings, uuid.uuid4().hex[:8]

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            settings: dict[str, Any] = {
                "project": os.environ.get("WANDB_PROJECT", "gcnzc"),
                "dir": run.folder,
                "id": self.id,
                "resume": "allow",
                "config": run.config.to_dict(),
            }
            self.board = wandb.init(**settings | self.settings)

    def on_record(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            numbers = {k: v for k, v in run.line.items() if isinstance(v, int | float)}
            self.board.log(numbers, step=run.epoch)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first:
            self.board.summary.update({"best_epoch": run.best.get("epoch", -1) + 1})
            self.board.finish()

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"id": self.id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.id = state["id"]
