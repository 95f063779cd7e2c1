"""Advance a loader to the next epoch with each iteration, for the loops of other libraries.

`gcnzc.Loader` repeats an epoch that was stopped early. Other libraries stop an iteration at any
batch and do not request another one after the last, so each iteration must be the next epoch.
"""

from gcnzc.loader.batches import Batches
from gcnzc.loader.loader import Loader
from gcnzc.sampling.batch import Batch


class EpochPerIteration:
    """Iterates over a loader, one epoch further each time.

    Args:
        loader: a loader over which nothing else iterates; it may be replaced between iterations.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        # epoch and position at which the last iteration began
        self._begun: tuple[int, int] | None = None
        self._is_loaded = False

    def begin(self) -> Batches[Batch]:
        """Return the batches of the next epoch, or the remaining ones of a loaded state."""
        now, loader = self._now(), self.loader
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
