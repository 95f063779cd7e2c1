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
from collections.abc import Callable
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Blocks, Compression
from gcnzc.exchange import Algorithm, Group
from gcnzc.exchange.sync import dense_buffers
from gcnzc.optim.local_method import Fragment, LocalMethod
from gcnzc.optim.state import Field, Number, Vector
from gcnzc.optim.validation import check_above_zero, check_at_least_zero, check_count

QUANTIZED = Blocks("int8", stochastic=True)
"""the default compression, which is unbiased, as the paper's analysis requires"""


class FedGLOMO(LocalMethod):
    """FedGLOMO: local steps with momentum along two trajectories, and rounds with a momentum.

    `step` needs a closure, and calls it up to four times, like `step` of `torch.optim.LBFGS`: for
    each of the two trajectories, at the current point and, with local momentum, at the previous
    point::

        def closure():
            optimizer.zero_grad()
            loss = compute_loss(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    With `round_weight=1` there is no second trajectory, and with `local_momentum=0` no evaluation
    at the previous point. Pass the model as `module`; otherwise all evaluations update the buffers
    of BatchNorm.

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
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: E, or "auto"; see `LocalMethod`.
        round_weight: b, the weight of the current round, in (0, 1]; 1 for no global momentum.
        local_momentum: m, in [0, 1]; 0 for none.
        participants: the number of ranks that take part in a round; None for all. A rank that does
            not participate does not call the closure, but sends as many bytes.
        seed: random seed of the choice of participants.
        compress: compression of the exchanged vector, d and c together; None for none.
        options: see `LocalMethod`.

    Raises:
        ValueError: an option is out of range, or the inner optimizer is another one.
    """

    needs_closure = True
    accepts_shards = False
    anchor: Tensor
    """(n,): w_k, equal on all ranks"""
    momentum: Tensor | None
    """(n,): u, equal on all ranks; None before the first round, or if round_weight is 1"""
    previous: Tensor | None
    """(n,): w_(k-1), where the second trajectories start; None if `momentum` is"""
    round: int
    """k, equal on all ranks"""
    compared_options = (
        *("round_weight", "local_momentum", "participants", "seed"),
        *LocalMethod.compared_options,
    )

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = 8,
        round_weight: float = 0.5,
        local_momentum: float = 0.8,
        participants: int | None = None,
        seed: int = 0,
        compress: Compression | None = QUANTIZED,
        **options: Any,
    ) -> None:
        check_above_zero("round_weight", round_weight, 1)
        check_at_least_zero("local_momentum", local_momentum)
        if local_momentum > 1:
            raise ValueError(f"local_momentum is {local_momentum}\n\nhint: give a number in [0, 1]")
        if participants is not None:
            check_count("participants", participants, 1)
        check_count("seed", seed)
        self.round_weight, self.local_momentum = round_weight, local_momentum
        self.participants, self.seed = participants, seed
        self.main, self.second = Trajectory("main"), Trajectory("second")
        self.momentum = self.previous = None
        self.closure: Callable[[], Any] | None = None
        """the closure of the next step. `step` sets it; a caller that runs `algorithm` itself sets
        it before"""
        self.loss: Any = None
        """what the closure returned first in the last step, detached from its graph; None if it was
        not called"""
        options |= {"local_steps": local_steps, "compress": compress}
        super().__init__(inner, group, alone=True, **options)

    def start(self) -> None:
        """See `DistributedOptimizer`.

        Raises:
            ValueError: there are more participants than ranks, or the inner optimizer is not SGD.
        """
        count, world_size = self.participants, self.group.world_size
        if count is not None and count > world_size:
            raise ValueError(
                f"{count} participants of {world_size} ranks\n\nhint: give at most the number of "
                "ranks, or None for all of them"
            )
        self._check_is_plain_sgd()
        super().start()

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        count = self.flat.num_elements
        own: dict[str, Any] = {"kind": "local", "resize": "mean", "may_overflow": True}
        trajectories = [
            Vector(each, name, count, is_optional=True, **own)
            for each in (self.main, self.second)
            for name in ("point", "before", "velocity")
        ]
        # a state has both, or neither before the first mean
        vectors = [
            Vector(
                self, "momentum", count, exists=lambda values: values.get("previous") is not None
            ),
            Vector(
                self, "previous", count, exists=lambda values: values.get("momentum") is not None
            ),
        ]
        round_number = Number(self, "round")
        return [
            *super().declare(),
            self.outer_vector("anchor"),
            *vectors,
            round_number,
            *trajectories,
        ]

    def restart(self) -> None:
        """See `LocalMethod`: begin a round from the current parameters."""
        self.anchor = self.parameters
        self.main.reset()
        self.second.reset()

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        if self.group.rank not in self.ranks():
            # with another number of ranks, other ranks may participate
            self.main.reset()
            self.second.reset()

    def ranks(self) -> frozenset[int]:
        """Return the ranks of the current round, which each rank computes alone."""
        return choose_ranks(self.group.world_size, self.participants, self.seed, self.round)

    # --- local steps

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See `DistributedOptimizer`; calls the closure several times.

        Returns:
            The result of the first call of the closure, detached from its graph; None if it was not
            called, because this rank does not participate in the round.

        Raises:
            TypeError: there is no closure.
        """
        self.closure = closure
        try:
            super().step()
        finally:
            self.closure = None
        loss: float | None = self.loss
        return loss

    @torch.no_grad()
    def local_step(self) -> None:
        """See `LocalMethod`: a step along each trajectory."""
        if self.closure is None:
            raise TypeError(
                f"a step of {self.name} without a closure\n\nhint: call step(closure), where "
                "closure() computes the loss of the minibatch, calls backward() on it, and "
                "returns it; a GradScaler does not support closures"
            )
        # a scheduler may have changed the momentum
        self._check_is_plain_sgd()
        self.loss = None
        if self.group.rank not in self.ranks():
            return
        trajectories = [self.main]
        if self.previous is not None:
            if self.second.point is None:
                self.second.point = self.previous
            trajectories.append(self.second)
        with Evaluations(self, self.closure) as evaluations:
            # the first trajectory is evaluated first, because `loss` is that at the parameters
            steps: list[tuple[Trajectory, Tensor, Tensor]] = []
            for each in trajectories:
                point = evaluations.start if each.point is None else each.point
                velocity = self._velocity(evaluations, each, point)
                if velocity is None:
                    # neither trajectory takes the step
                    self.parameters = evaluations.start
                    break
                steps.append((each, point, velocity))
            else:
                # the first trajectory last, so that its point remains in the parameters
                for each, point, velocity in reversed(steps):
                    self._move(each, point, velocity)
        # tensors with a graph cannot be copied by copy.deepcopy, and keep activations in memory
        loss = evaluations.loss
        self.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def _velocity(
        self, evaluations: "Evaluations", trajectory: "Trajectory", point: Tensor
    ) -> Tensor | None:
        """Return v (n,) of a trajectory at its current point; None if a gradient is not finite."""
        gradient = evaluations.gradient(point)
        if gradient is None or trajectory.velocity is None or trajectory.before is None:
            return gradient
        before = evaluations.gradient(trajectory.before)
        if before is None:
            return None
        return gradient.add_(trajectory.velocity - before, alpha=self.local_momentum)

    def _move(self, trajectory: "Trajectory", point: Tensor, velocity: Tensor) -> None:
        """Take a step of the inner optimizer from a point."""
        self.parameters = point
        gradients = self.flat.views(velocity)
        for parameter, gradient in zip(self.flat.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        self.inner.step()
        if trajectory.point is not None:
            trajectory.point = self.parameters
        if self.local_momentum:
            trajectory.before, trajectory.velocity = point, velocity

    def _check_is_plain_sgd(self) -> None:
        """Check that the inner optimizer's step is the learning rate times the gradient.

        Raises:
            ValueError: it is another optimizer than SGD, or has momentum.
        """
        is_sgd = isinstance(self.inner, torch.optim.SGD)
        if is_sgd and not any(group["momentum"] for group in self.inner.param_groups):
            return
        kind = type(self.inner).__name__
        raise ValueError(
            f"{self.name} around {kind}{' with momentum' * is_sgd}"
            "\n\nhint: give torch.optim.SGD with momentum=0; the method has momenta of its own"
        )

    # --- rounds

    def fragment_sizes(self) -> list[int]:
        """See `LocalMethod`: one vector, or two with global momentum."""
        return [self.flat.num_elements * (1 if self.round_weight == 1 else 2)]

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """See `LocalMethod`: D_i and D_i - D'_i; the latter is zeros in the first round."""
        count = self.flat.num_elements
        fragment.excluded = set(range(self.group.world_size)) - self.ranks()
        difference, change = out[:count], out[count:]
        self.flat.read_parameters(difference)
        torch.sub(self.anchor, difference, out=difference)
        change.zero_()
        if self.previous is not None and self.second.point is not None:
            torch.sub(self.second.point, self.previous, out=change).add_(difference)

    def apply(self, fragment: Fragment, mean: Tensor) -> Algorithm[None]:
        """See `LocalMethod`."""
        count = self.flat.num_elements
        update = mean[:count]
        if self.round_weight < 1:
            if self.momentum is None or self.previous is None:
                self.momentum, self.previous = update.clone(), self.anchor.clone()
            else:
                self.momentum.add_(mean[count:]).lerp_(update, self.round_weight)
                self.previous.copy_(self.anchor)
            update = self.momentum
        self.anchor.sub_(update)
        self.discard(fragment)
        return
        yield

    def discard(self, fragment: Fragment) -> None:
        """See `LocalMethod`: begin a round from the anchor."""
        whole = self.whole_vector()
        whole.is_finite = fragment.is_finite
        self.set_parameters(whole, self.anchor)
        self.main.reset()
        self.second.reset()
        self.round += 1


class Trajectory:
    """The state of the local steps of one round from one starting point.

    All vectors are None before the first step.

    Args:
        name: the first word of the names of the vectors in states.
    """

    def __init__(self, name: str) -> None:
        self.state_prefix = name
        self.reset()

    def reset(self) -> None:
        """Begin a round."""
        self.point: Tensor | None = None
        """(n,): the current point of the second trajectory; None for the first one, whose current
        point is the parameters"""
        self.before: Tensor | None = None
        """(n,): the previous point, before the last step; None without local momentum"""
        self.velocity: Tensor | None = None
        """(n,): v of the last step; None without local momentum"""


def choose_ranks(world_size: int, count: int | None, seed: int, round: int) -> frozenset[int]:
    """Return the participants of a round: the ranks with the smallest hashes of seed and round.

    Args:
        world_size: W.
        count: the number of participants; None for all ranks.
        seed: random seed.
        round: the number of the round.
    """
    if count is None:
        return frozenset(range(world_size))

    def draw(rank: int) -> bytes:
        return hashlib.blake2b(f"{seed} {round} {rank}".encode(), digest_size=8).digest()

    return frozenset(sorted(range(world_size), key=draw)[:count])


class Evaluations:
    """Evaluates a closure at several points of one step, within a `with` block.

    The difference of two gradients of one minibatch has a small variance only if both use the same
    random numbers, for example for dropout. Every evaluation therefore begins with the same states
    of torch's generators, of the CPU and of the parameters' GPU, and with the same dense buffers of
    the optimizer's `module`, such as those of BatchNorm. At the end of the block, the generators
    and buffers have the states after the first evaluation. After an error, the parameters are those
    at the beginning of the block.

    Args:
        optimizer: its parameters are set to the points.
        closure: computes the loss and the gradients at the current parameters.
    """

    def __init__(self, optimizer: LocalMethod, closure: Callable[[], Any]) -> None:
        self.optimizer, self.closure = optimizer, closure
        self.is_first = True
        self.loss: Any = None
        """the result of the first call of the closure"""

    def __enter__(self) -> "Evaluations":
        self.start = self.optimizer.parameters
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
            self.optimizer.parameters = self.start

    def gradient(self, point: Tensor) -> Tensor | None:
        """Compute the gradient at a point, times the optimizer's `gradient_factor`.

        Args:
            point: (n,) parameters, which the optimizer's parameters are set to.

        Returns:
            (n,), with zeros for missing gradients; None if it is not finite, which the optimizer
            has counted and reported.
        """
        optimizer, flat = self.optimizer, self.optimizer.flat
        optimizer.parameters = point
        for parameter in flat.parameters:
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
        return flat.read_gradients(flat.empty(), optimizer.gradient_factor())

    def _read_state(self) -> list[Tensor]:
        """Return copies of the states of the generators and of the buffers."""
        module, device = self.optimizer.module, self.optimizer.flat.device
        buffers = [] if module is None else [each for _, each in dense_buffers(module)]
        states = [each.clone() for each in buffers]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return [*states, torch.get_rng_state()]

    @torch.no_grad()
    def _write_state(self, state: list[Tensor]) -> None:
        """Write the result of `_read_state`."""
        module, device = self.optimizer.module, self.optimizer.flat.device
        *states, cpu = state
        torch.set_rng_state(cpu)
        if device.type == "cuda":
            torch.cuda.set_rng_state(states.pop(), device)
        if module is not None:
            for (_, buffer), saved in zip(dense_buffers(module), states, strict=True):
                buffer.copy_(saved)
