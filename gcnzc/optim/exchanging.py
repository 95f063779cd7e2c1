"""An optimizer of torch whose steps exchange: what a training loop and a checkpoint see of it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Group, present, run
from gcnzc.optim.group_options import OptionComparison
from gcnzc.optim.scaling import report_overflow
from gcnzc.optim.states import packed, unpacked
from gcnzc.optim.validation import check_count, check_group, check_param_group
from gcnzc.replicas import synchronise_buffers


class Exchanging(Optimizer):
    """The base of optimizers that workers step together.

    What they do together is an algorithm, which `step` runs over processes, and `lockstep` in one.

    Args:
        params: as torch's optimizers take them.
        defaults: options of the groups.
        group: of all workers; those for which torch.distributed was initialised if None.
        signals: how many things, such as a wish to stop, are told with an exchange.
        module: the model. Its buffers, and parameters that are not in `params`, are then broadcast
            from rank 0 at the start too, and `finalize` leaves its buffers equal on all ranks.
    """

    is_shared = False
    """whether a checkpoint of one worker is that of all"""

    # torch's GradScaler leaves the unscaling, and the choice to skip, to `step`
    _step_supports_amp_scaling = True

    grad_scale: Tensor | None
    """while GradScaler takes a step: what the gradients are multiplied by; None if unscaled"""
    found_inf: Tensor
    """while GradScaler takes a step: more than 0 if it has found a gradient that is not finite"""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        group: Group | None,
        signals: int,
        module: nn.Module | None = None,
    ) -> None:
        if group is not None:
            check_group(group)
        check_count("signals", signals)
        super().__init__(params, defaults)
        self.group = present() if group is None else group
        self.module = module
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
        skipped = self.skipped
        run(self.algorithm(), self.group)
        if self.skipped > skipped and hasattr(self, "found_inf"):
            report_overflow(self)
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

    @property
    def has_overflowed(self) -> bool:
        """Whether a GradScaler that takes the step has found a gradient that is not finite."""
        return bool(getattr(self, "found_inf", False))

    def gradient_factor(self) -> float | Tensor:
        """The factor by which this rank's gradients enter the mean over the ranks.

        Its weight, divided by the scale of a GradScaler that takes the step: then () float64 on the
        device of that. NaN if it has found a gradient that is not finite, even if it was clipped
        since, so that all ranks skip the step.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return self.weight
        if not isinstance(found_inf, Tensor):
            # a rank without any gradient has the number 0
            found_inf = torch.zeros(())
        if scale is None:
            scale = torch.ones_like(found_inf)
        factor = self.weight / scale.double()
        return factor.masked_fill(found_inf.to(factor.device) > 0, torch.nan)

    def scale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Multiply gradients, in place, by this rank's weight over the scale of a GradScaler."""
        scale = getattr(self, "grad_scale", None)
        factor = self.weight / (1.0 if scale is None else float(scale))
        for parameter in parameters if factor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @abstractmethod
    def made_alike(self) -> Algorithm[None]:
        """Begin with the parameters and buffers of rank 0, on all ranks, once.

        Raises:
            ValueError: parameters, buffers or options differ; raised on all ranks.
        """

    def connect(self) -> None:
        """Begin with the same parameters as the other ranks, if they can be reached.

        What a constructor ends with.
        """
        if self.group.backend:
            run(self.made_alike(), self.group)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Names and tensors that begin as on rank 0: all parameters, and the module's buffers."""
        named: list[tuple[str, Tensor]] = list(self.named_parameters())
        if self.module is not None:
            named += [*self.module.named_parameters(), *self.module.named_buffers()]
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:
            # a parameter of a group is one of the module, too
            unique.setdefault(id(tensor), (name, tensor))
        return list(unique.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all groups, frozen ones included, named by their places."""
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"group {number}, parameter {place}", parameter

    def trainable(self) -> list[bool]:
        """Which parameters of all groups have requires_grad now, in their order."""
        return [parameter.requires_grad for _, parameter in self.named_parameters()]

    def demand_trainable(self, expected: Sequence[bool]) -> None:
        """Raise an error unless the same parameters have requires_grad as at the start.

        Raises:
            ValueError: they do not.
        """
        found = self.trainable()
        if found == expected:
            return
        pairs = enumerate(zip_longest(found, expected))
        place, (now, before) = next(each for each in pairs if each[1][0] != each[1][1])
        names = [name for name, _ in self.named_parameters()]
        name = names[place] if place < len(names) else f"parameter {place} of all groups"
        raise ValueError(
            f"{name}: {_describe_trainable(now)} now, but {_describe_trainable(before)} when "
            f"{type(self).__name__} was made\n\nhint: its vectors are laid out once; set "
            "requires_grad and add parameters first, on all ranks, and then make the optimizer, or "
            "a new one"
        )

    def finalize(self) -> None:
        """Leave all ranks with the same parameters and buffers; once, after the last step.

        Buffers are those of `module`: floating-point ones, such as BatchNorm's, become their means.
        """
        run(self.finalized(), self.group)

    def finalized(self) -> Algorithm[None]:
        """What `finalize` does, for `lockstep`."""
        yield from self.made_alike()
        yield from self.finish()
        if self.module is not None and self.group.world_size > 1:
            yield from synchronise_buffers(self.module)

    def finish(self) -> Algorithm[None]:
        """What leaves all ranks with the same parameters."""
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


def _describe_trainable(flag: bool | None) -> str:
    return "no such parameter" if flag is None else f"requires_grad={flag}"
