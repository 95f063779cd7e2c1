"""FedGLOMO: momentum of gradient differences in local steps and in the mean over ranks.

A round k has E local steps. Each participating rank i takes them along two trajectories: from the
parameters w_k, and from those of the previous round, w_(k-1). Both use the same minibatches B_t and
random numbers:

    v_0   = g(w_k; B_0)                                   local momentum
    v_t   = g(w_(k,t); B_t) + m (v_(t-1) - g(w_(k,t-1); B_t))
    w_(k,t+1) = w_(k,t) - lr v_t
    D_i   = w_k - w_(k,E)                                 difference of a round
    D'_i  = w_(k-1) - w'_(k-1,E)                          difference of the other trajectory

    d = mean_i Q(D_i)        c = mean_i Q(D_i - D'_i)     over the participants
    u_k = b d + (1 - b) (u_(k-1) + c)                     global momentum; u_0 = d
    w_(k+1) = w_k - u_k

as in Das et al., "Faster Non-Convex Federated Learning via Global and Local Momentum" (2022,
https://arxiv.org/abs/2012.04061). Both momenta have the form of STORM (Cutkosky and Orabona, 2019,
https://arxiv.org/abs/1905.10018): a correction moves the old estimate to the new point. With b = 1
and m = 0 it is federated averaging.

Notation: W ranks, n elements, E local steps, m local momentum, b the `round_weight` of the current
round, Q the compression.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Blocks, Compression
from gcnzc.exchange import Algorithm
from gcnzc.exchange.sync import dense_buffers
from gcnzc.optim.state_layout import SavedTensor, check_value
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.parameter_mean import DifferenceMean
from gcnzc.optim.strategy.recipe import LocalStep, Recipe
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.validation import check_above_zero, check_at_least_zero, check_count

# Evaluate a closure at several points in one step, with the same random numbers.
#
# The difference of two gradients of one minibatch has a small variance only if both use the same
# random numbers, for example for dropout.
#
# Notation: n elements of the flat parameter vector.


class Evaluations:
    """Evaluates a closure at several points, within a `with` block.

    Every evaluation begins with the same states of torch's generators, of the CPU and of the
    parameters' GPU, and with the same dense buffers of the optimizer's `module`, such as those of
    BatchNorm. At the end of the block, the generators and buffers have the states after the first
    evaluation. After an error, the parameters are those at the beginning of the block.

    Args:
        optimizer: its parameters are set to the points.
        closure: computes the loss and the gradients at the current parameters.
    """

    def __init__(self, optimizer: Strategy, closure: Callable[[], Any]) -> None:
        self.optimizer, self.closure = optimizer, closure
        self.is_first = True
        self.loss: Any = None
        """the result of the first call of the closure"""

    def __enter__(self) -> "Evaluations":
        self.start = self.optimizer.vector()
        """(n,): the parameters at the beginning"""
        self._before = self._after = self._read_state()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write_state(self._after)
        if kind is not None:
            self.optimizer.flat_params.write_parameters(self.start)

    def gradient(self, point: Tensor) -> Tensor | None:
        """Compute the gradient at a point, times the optimizer's `gradient_factor`.

        Args:
            point: (n,) parameters, which the optimizer's parameters are set to.

        Returns:
            (n,), with zeros for missing gradients; None if it is not finite, which the optimizer
            has counted and reported.
        """
        optimizer, flat_params = self.optimizer, self.optimizer.flat_params
        flat_params.write_parameters(point)
        for parameter in flat_params.parameters:
            parameter.grad = None
        if not self.is_first:
            self._write_state(self._before)
        # autocast may have cached copies of the parameters at another point
        torch.clear_autocast_cache()
        with torch.enable_grad():
            loss = self.closure()
        if self.is_first:
            self.loss, self._after, self.is_first = loss, self._read_state(), False
        if not optimizer.check_gradients():
            return None
        return flat_params.read_gradients(flat_params.empty(), optimizer.gradient_factor())

    def _read_state(self) -> list[Tensor]:
        """Return copies of the states of the generators and of the buffers."""
        module, device = self.optimizer.module, self.optimizer.flat_params.device
        buffers = [] if module is None else [each for _, each in dense_buffers(module)]
        states = [each.clone() for each in buffers]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return [*states, torch.get_rng_state()]

    @torch.no_grad()
    def _write_state(self, state: list[Tensor]) -> None:
        """Write the result of `_read_state`."""
        module, device = self.optimizer.module, self.optimizer.flat_params.device
        *states, cpu = state
        torch.set_rng_state(cpu)
        if device.type == "cuda":
            torch.cuda.set_rng_state(states.pop(), device)
        if module is not None:
            for (_, buffer), saved in zip(dense_buffers(module), states, strict=True):
                buffer.copy_(saved)


# The exchange of methods in which only some ranks take part in a round.
#
# Notation: W ranks, k extras.


@dataclass
class Participants:
    """The ranks that take part in each round, which each rank computes without communication.

    Raises:
        ValueError: `count` is not a number from 1 on.
    """

    count: int | None = None
    """the number of ranks in a round; None for all"""
    seed: int = 0
    """random seed: the ranks are chosen by a hash of the seed, the round and the rank"""
    round: int = 0
    """the current round, equal on all ranks"""

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("participants", self.count, 1)
        check_count("seed", self.seed)

    def ranks(self, world_size: int) -> frozenset[int]:
        """Return the ranks of the current round."""
        if self.count is None:
            return frozenset(range(world_size))

        def draw(rank: int) -> bytes:
            text = f"{self.seed} {self.round} {rank}"
            return hashlib.blake2b(text.encode(), digest_size=8).digest()

        return frozenset(sorted(range(world_size), key=draw)[: self.count])

    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text."""
        return "" if self.count is None else f"participants={self.count}, seed={self.seed}"


class ParticipantsMean(AllRanks):
    """The mean over the participants of the current round whose vector is finite.

    The other ranks contribute zeros, because each rank also reduces a slice of the vector.

    Args:
        participants: the ranks of the rounds.
        compress: the compression.
        name: the name of the compression errors in checkpoints.
    """

    def __init__(self, participants: Participants, compress: Compression | None, name: str) -> None:
        super().__init__(compress, name)
        self.participants = participants

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`.

        Raises:
            ValueError: there are more participants than ranks.
        """
        super().attach(strategy)
        count, world_size = self.participants.count, strategy.group.world_size
        if count is not None and count > world_size:
            raise ValueError(
                f"{count} participants of {world_size} ranks\n\nhint: give at most the number of "
                "ranks, or None for all of them"
            )

    def describe(self) -> str:
        """See `Exchange`."""
        return ", ".join(filter(None, (self.participants.describe(), super().describe())))

    @property
    def num_contributors(self) -> int:
        """See `Collective`."""
        return len(self.participants.ranks(self.strategy.group.world_size))

    def prepare(self, values: Tensor) -> None:
        """See `Collective`."""
        super().prepare(values)
        group = self.strategy.group
        if group.rank not in self.participants.ranks(group.world_size):
            # with the flag that follows the vector
            values[: self.reducer.num_elements + 1] = 0


QUANTIZED = Blocks("int8", stochastic=True)
"""the default compression, which is unbiased, as the paper's analysis requires"""


def fedglomo(
    local_steps: int | str = 8,
    round_weight: float = 0.5,
    local_momentum: float = 0.8,
    *,
    participants: int | None = None,
    seed: int = 0,
    compress: Compression | None = QUANTIZED,
) -> Recipe:
    """Return the recipe of FedGLOMO.

    `Strategy.step` needs a closure, and calls it up to four times: for each of the two
    trajectories, at the current point and, with local momentum, at the previous point. With
    `round_weight=1` there is no second trajectory, and with `local_momentum=0` no evaluation at the
    previous point. Pass the model as `module`; otherwise all evaluations update the buffers of
    BatchNorm.

    The inner optimizer is `torch.optim.SGD` without momentum. It applies the learning rate and the
    weight decay. A missing gradient counts as zeros.

    A rank stores three vectors (n,) between rounds: w_k, w_(k-1) and u. Within a round it stores up
    to five more: v and the previous point of both trajectories, and the current point of the
    second one. With `round_weight=1` it stores w_k between rounds, and up to two more vectors
    within a round.

    If an exchange fails, all ranks discard the round and start again from w_k, with the next
    round's participants. `finalize` within a round averages the parameters of all ranks, so that
    a rank that does not participate contributes w_k.

    Args:
        local_steps: E, or "auto"; see `LocalSGD`.
        round_weight: b, the weight of the current round, in (0, 1]; 1 for no global momentum.
        local_momentum: m, in [0, 1]; 0 for none.
        participants: the number of ranks that take part in a round; None for all. A rank that does
            not participate does not call the closure, but sends as many bytes.
        seed: random seed of the choice of participants.
        compress: compression of the exchanged vector, d and c together; None for none.

    Raises:
        ValueError: an option is out of range.
    """
    check_above_zero("round_weight", round_weight)
    if round_weight > 1:
        raise ValueError(f"round_weight is {round_weight}\n\nhint: give a number in (0, 1]")
    check_at_least_zero("local_momentum", local_momentum)
    if local_momentum > 1:
        raise ValueError(f"local_momentum is {local_momentum}\n\nhint: give a number in [0, 1]")
    chosen = Participants(participants, seed)
    update = GlobalMomentum(round_weight, chosen)
    return Recipe(
        "FedGLOMO",
        EveryInterval(),
        update,
        ParticipantsMean(chosen, compress, "differences"),
        local_steps=local_steps,
        is_for_one_rank=True,
        local=CoupledSteps(update, local_momentum),
    )


@dataclass
class Trajectory:
    """The state of the local steps of one round from one starting point.

    All vectors are None before the first step.
    """

    point: Tensor | None = None
    """(n,): the current point of the second trajectory; None for the first one, whose current point
    is the parameters"""
    before: Tensor | None = None
    """(n,): the previous point, before the last step; None without local momentum"""
    velocity: Tensor | None = None
    """(n,): v of the last step; None without local momentum"""


TRAJECTORY_VECTORS = [
    f"{name} {field.name}" for name in ("main", "second") for field in fields(Trajectory)
]
"""the names of the vectors of both trajectories in states"""


class GlobalMomentum(DifferenceMean):
    """Exchange differences and their changes, and update the parameters by the global momentum."""

    momentum: Tensor | None
    """(n,): u, equal on all ranks; None before the first round, or if round_weight is 1"""
    previous: Tensor | None
    """(n,): w_(k-1), where the second trajectories start; None if `momentum` is"""

    def __init__(self, round_weight: float, participants: Participants) -> None:
        self.round_weight, self.participants = round_weight, participants
        self.momentum = self.previous = None
        self.main, self.second = Trajectory(), Trajectory()

    @property
    def num_elements(self) -> int:
        """See `Update`: of one vector, or of two with global momentum."""
        return self.strategy.flat_params.num_elements * (1 if self.round_weight == 1 else 2)

    @property
    def is_participant(self) -> bool:
        """Whether this rank takes part in the current round."""
        group = self.strategy.group
        return group.rank in self.participants.ranks(group.world_size)

    def describe(self) -> str:
        """See `Update`."""
        return f"round_weight={self.round_weight}"

    def reinitialize(self) -> None:
        """See `RecipePart`."""
        super().reinitialize()
        self.main, self.second = Trajectory(), Trajectory()

    def initialize(self) -> None:
        """See `RecipePart`."""
        self.reinitialize()
        self.momentum = self.previous = None
        self.participants.round = 0

    def read(self, out: Tensor) -> None:
        """See `Update`: D_i and D_i - D'_i; the latter is zeros in the first round."""
        count = self.strategy.flat_params.num_elements
        self.strategy.flat_params.read_parameters(out)
        difference, change = out[:count], out[count : self.num_elements]
        torch.sub(self.anchor, difference, out=difference)
        if self.round_weight == 1:
            return
        change.zero_()
        if self.previous is not None and self.second.point is not None:
            torch.sub(self.second.point, self.previous, out=change).add_(difference)

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`."""
        count = self.strategy.flat_params.num_elements
        update = mean[:count]
        if self.round_weight < 1:
            if self.momentum is None:
                self.momentum, self.previous = update.clone(), self.anchor.clone()
            else:
                self.momentum.add_(mean[count:]).lerp_(update, self.round_weight)
                assert self.previous is not None, "set with the momentum"
                self.previous.copy_(self.anchor)
            update = self.momentum
        self.anchor.sub_(update)
        self._begin_round()
        return
        yield

    def discard(self) -> None:
        """See `Update`: begin a round from the same parameters."""
        self._begin_round()

    def _begin_round(self) -> None:
        self.strategy.set_parameters(self.anchor)
        self.main, self.second = Trajectory(), Trajectory()
        self.participants.round += 1

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`."""
        vectors = {"momentum": self.momentum, "previous": self.previous}
        return {
            **super().shared_state(),
            "round": self.participants.round,
            **{name: each for name, each in vectors.items() if each is not None},
        }

    def local_state(self) -> dict[str, Tensor]:
        """See `RecipePart`."""
        trajectories = {"main": self.main, "second": self.second}
        return {
            f"{trajectory} {name}": vector
            for trajectory, each in trajectories.items()
            for name, vector in vars(each).items()
            if vector is not None
        }

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        check_value(shared, "round")

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`."""
        found = super().saved_tensors(snapshot)
        vector = SavedTensor((self.strategy.flat_params.num_elements,))
        # before the first round, or if `round_weight` is 1, a state has neither
        if "momentum" in snapshot["shared"] or "previous" in snapshot["shared"]:
            found |= {"momentum": vector, "previous": vector}
        return found | {name: vector for name in TRAJECTORY_VECTORS if name in snapshot["local"]}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        super().load(shared, local, shards)
        self.participants.round = shared["round"]
        self.momentum = self._vector(shared, "momentum")
        self.previous = self._vector(shared, "previous")
        # with another number of ranks, other ranks may participate
        own = local if self.is_participant else {}
        vectors = [self._vector(own, name) for name in TRAJECTORY_VECTORS]
        half = len(vectors) // 2
        self.main, self.second = Trajectory(*vectors[:half]), Trajectory(*vectors[half:])

    def _vector(self, state: Mapping[str, Any], name: str) -> Tensor | None:
        return self.strategy.vector(state[name]) if name in state else None


class CoupledSteps(LocalStep):
    """Take the same local steps from the parameters of this round and from those of the previous.

    Args:
        update: the update, which stores the trajectories.
        momentum: m, the local momentum.
    """

    def __init__(self, update: GlobalMomentum, momentum: float) -> None:
        self.update, self.momentum = update, momentum

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        check_is_plain_sgd(strategy)

    def describe(self) -> str:
        """See `LocalStep`."""
        return f"local_momentum={self.momentum}"

    @torch.no_grad()
    def take(self, closure: Callable[[], Any]) -> Any:
        """See `LocalStep`."""
        # a scheduler may have changed the momentum
        check_is_plain_sgd(self.strategy)
        update = self.update
        if not update.is_participant:
            return None
        trajectories = [update.main]
        if update.previous is not None:
            if update.second.point is None:
                update.second.point = update.previous
            trajectories.append(update.second)
        with Evaluations(self.strategy, closure) as evaluations:
            # the first trajectory is evaluated first, because `loss` is that at the parameters
            steps: list[tuple[Trajectory, Tensor, Tensor]] = []
            for trajectory in trajectories:
                point = evaluations.start if trajectory.point is None else trajectory.point
                velocity = self._velocity(evaluations, trajectory, point)
                if velocity is None:
                    # neither trajectory takes the step
                    self.strategy.flat_params.write_parameters(evaluations.start)
                    return evaluations.loss
                steps.append((trajectory, point, velocity))
            # the first trajectory last, so that its point remains in the parameters
            for trajectory, point, velocity in reversed(steps):
                self._move(trajectory, point, velocity)
        return evaluations.loss

    def _velocity(
        self, evaluations: Evaluations, trajectory: Trajectory, point: Tensor
    ) -> Tensor | None:
        """Return v (n,) of a trajectory at its current point; None if a gradient is not finite."""
        gradient = evaluations.gradient(point)
        if gradient is None or trajectory.velocity is None or trajectory.before is None:
            return gradient
        before = evaluations.gradient(trajectory.before)
        if before is None:
            return None
        return gradient.add_(trajectory.velocity - before, alpha=self.momentum)

    def _move(self, trajectory: Trajectory, point: Tensor, velocity: Tensor) -> None:
        """Take a step of the inner optimizer from a point."""
        flat_params = self.strategy.flat_params
        flat_params.write_parameters(point)
        flat_params.write_gradients(velocity, [True] * len(flat_params.parameters))
        self.strategy.inner.step()
        if trajectory.point is not None:
            trajectory.point = self.strategy.vector()
        if self.momentum:
            trajectory.before, trajectory.velocity = point, velocity


def check_is_plain_sgd(strategy: Strategy) -> None:
    """Check that the inner optimizer's step is the learning rate times the gradient.

    Raises:
        ValueError: it is another optimizer than SGD, or has momentum.
    """
    inner = strategy.inner
    if isinstance(inner, torch.optim.SGD) and not any(
        group["momentum"] for group in inner.param_groups
    ):
        return
    kind = type(inner).__name__
    raise ValueError(
        f"{strategy.name} around {kind}{' with momentum' * isinstance(inner, torch.optim.SGD)}"
        "\n\nhint: give torch.optim.SGD with momentum=0; the method has momenta of its own"
    )
