"""The epoch of the next iteration over a loader whose epochs a framework counts.

`gcnzc.Loader` begins an epoch again that was left early. The loops of other libraries leave one
when they like, and take no step beyond the last minibatch; for them each iteration is another.
"""

from gcnzc.loader.loader import Batches, Loader


class Turns:
    """Iterations over a loader, each of them the next epoch.

    Args:
        loader: that nobody else iterates over; another may be put in its place between iterations.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        # epoch and batch where the last iteration began
        self._begun: tuple[int, int] | None = None
        self._is_loaded = False

    def begin(self) -> Batches:
        """The batches of the next epoch; of the present one, where a loaded state left it."""
        now, loader = self._now(), self.loader
        if self._begun == now:
            # nothing was taken
            loader.load_state_dict(loader.state_dict())
        elif self._is_over(now):
            loader.set_epoch(now[0] + 1)
        self._begun, self._is_loaded = self._now(), False
        return iter(loader)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch: from its begin, or where a loaded state left it.

        Raises:
            ValueError: `epoch` is not from 0 to 2**32 - 1.
        """
        if not self._is_loaded:
            # by way of another, since a loader stays where it is in the present one
            self.loader.set_epoch(0 if self.loader.epoch else 1)
        self.loader.set_epoch(epoch)
        self._begun = None

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration begin where `state` was taken.

        Raises:
            ValueError: as `gcnzc.Loader.load_state_dict` does.
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
