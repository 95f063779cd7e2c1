"""An optimizer of torch whose steps exchange: what a training loop and a checkpoint see of it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Group, present, run
from gcnzc.optim.group_options import OptionComparison
from gcnzc.optim.states import packed, unpacked
from gcnzc.optim.validation import check_count, check_group, check_param_group


class Exchanging(Optimizer):
    """The base of optimizers that workers step together.

    What they do together is an algorithm, which `step` runs over processes, and `lockstep` in one.

    Args:
        params: as torch's optimizers take them.
        defaults: options of the groups.
        group: of all workers; those for which torch.distributed was initialised if None.
        signals: how many things, such as a wish to stop, are told with an exchange.
    """

    is_shared = False
    """whether a checkpoint of one worker is that of all"""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], group: Group | None, signals: int
    ) -> None:
        if group is not None:
            check_group(group)
        check_count("signals", signals)
        super().__init__(params, defaults)
        self.group = present() if group is None else group
        self.weight = 1.0
        """of this worker's next gradient: its seeds over the mean seeds of the workers"""
        self.asks = [False] * signals
        """signals of this worker, told to all at the next exchange"""
        self.heard = [False] * signals
        """of each signal, whether a worker gave it; at an exchange, and not between two"""
        self.skipped = 0
        """steps that were left out, since a gradient was not finite"""
        self.options = OptionComparison()
        self.blame = ""
        """what was left out at the last step and why, in words; empty if nothing was"""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            TypeError: a parameter is sharded, complex, or of a dtype that cannot be averaged.
            ValueError: an option is out of its range.
        """
        super().add_param_group(param_group)
        check_param_group(type(self).__name__, self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        """What a copy and a pickle have: all but hooks, as of torch's optimizers.

        A copy communicates through the same group, and an unpickled optimizer through
        torch.distributed, if it is initialised for as many ranks with this one among them.
        """
        return {
            name: value
            for name, value in vars(self).items()
            # a scheduler wraps the step of the optimizer that it belongs to
            if name != "step" and not name.startswith(("_optimizer_", "_zero_grad"))
        }

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step, and exchange with the other workers when it is time.

        Raises:
            WorkerLost: another worker is gone.
            ValueError: the parameters of the workers differ, or the options of their groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run(self.algorithm(), self.group)
        return loss

    def fill_state(self) -> None:
        """Give `state` an entry for each parameter.

        Where it is empty torch.distributed.checkpoint takes a step, to have the state initialised.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state.setdefault(parameter, {})

    def state_dict(self) -> dict[str, Any]:
        """What this rank goes on from, in the layout of torch's optimizers.

        `state` has the step of each parameter, and for the first that is trained two entries of
        bytes: what all ranks have in common, and this rank's own, such as what compression has left
        out. The name of the latter has the rank, so that torch.distributed.checkpoint, which saves
        equal names of several ranks once, saves that of each.
        """
        return packed(type(self).__name__, self.snapshot(), self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of this rank, a `snapshot`, or what `resized` made of these.

        Raises:
            ValueError: it is of another rank, number of ranks or kind of optimizer, or of other
                parameters.
        """
        self.restore(unpacked(type(self).__name__, state_dict, self.group.rank))

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """What this rank goes on from: plain tensors, which are the optimizer's, and numbers.

        `shared` is the same on all ranks; `local`, `shards` and `errors` are this rank's own.
        """

    @abstractmethod
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a `snapshot` of this rank.

        Raises:
            ValueError: it is of another rank, another number of ranks or other parameters.
        """

    @abstractmethod
    def algorithm(self) -> Algorithm[None]:
        """What `step` does, for `lockstep`."""

    def finalize(self) -> None:
        """Leave all workers with the same parameters; once, after the last step."""
        run(self.finalized(), self.group)

    def finalized(self) -> Algorithm[None]:
        """What `finalize` does, for `lockstep`."""
        return
        yield

    def parameters_averaged(self) -> Algorithm[Any]:
        """Set the parameters to their mean over the workers, which they are if they are alike.

        Returns:
            What `parameters_restored` needs.
        """
        return
        yield

    def parameters_restored(self, own: Any) -> Algorithm[None]:
        """Set the parameters to what they were; `own` is what `parameters_averaged` returned."""
        return
        yield

    def demand_own(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an error unless a state is of this worker, of as many.

        Raises:
            ValueError: it is of another worker, or of another number of workers.
        """
        found = state_dict["rank"], state_dict["world_size"]
        own = self.group.rank, self.group.world_size
        if found != own:
            raise ValueError(
                f"the state of worker {found[0]} of {found[1]} is not that of worker {own[0]} of "
                f"{own[1]}\n\nhint: gcnzc.optim.resized makes the states of all workers fit "
                "another number of them"
            )
