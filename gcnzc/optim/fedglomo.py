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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Blocks, Compression
from gcnzc.compress.registry import check_compression
from gcnzc.exchange.sync import dense_buffers
from gcnzc.optim.local_method import Fragment, LocalMethod, outer_vector
from gcnzc.optim.options import option
from gcnzc.optim.state import OWN, Field, declared_fields, scalar, vector
from gcnzc.optim.validation import check_above_zero, check_count, check_share

QUANTIZED = Blocks("int8", stochastic=True)
"""the default compression, which is unbiased, as the paper's analysis requires"""


class Trajectory:
    """The state of the local steps of one round from one starting point.

    All vectors are None before the first step.

    Args:
        name: the first word of the names of the vectors in states.
    """

    point: Tensor | None = vector(None, is_optional=True, **OWN)
    """(n,): the current point of the second trajectory; None for the first one, whose current
    point is the parameters"""
    before: Tensor | None = vector(None, is_optional=True, **OWN)
    """(n,): the previous point, before the last step; None without local momentum"""
    velocity: Tensor | None = vector(None, is_optional=True, **OWN)
    """(n,): v of the last step; None without local momentum"""

    def __init__(self, name: str) -> None:
        self.state_prefix = name
        self.reset()

    def reset(self) -> None:
        """Begin a round."""
        self.point = self.before = self.velocity = None


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
        compress: compression of the exchanged vector, d and c together; None for none. The default
            is int8 with stochastic rounding.
        options: see `LocalMethod`.

    Raises:
        ValueError: an option is out of range, or the inner optimizer is another one.
    """

    needs_closure = True
    accepts_shards = False
    local_steps: Any = option(8)
    round_weight: float = option(0.5, partial(check_above_zero, most=1))
    local_momentum: float = option(0.8, check_share)
    participants: int | None = option(None, partial(check_count, least=1))
    seed: int = option(0, check_count)
    compress: Compression = option(QUANTIZED, check_compression, is_optional=True)
    alone = True

    anchor: Tensor = outer_vector()
    """(n,): w_k, equal on all ranks"""
    has_momentum: bool = scalar(False)
    """whether there are `momentum` and `previous`: after the first mean, unless round_weight is
    1"""
    momentum: Tensor = vector(exists=lambda own: own.has_momentum)
    """(n,): u, equal on all ranks"""
    previous: Tensor = vector(exists=lambda own: own.has_momentum)
    """(n,): w_(k-1), where the second trajectories start"""
    round: int = scalar()
    """k, equal on all ranks"""
    closure: Callable[[], Any] | None = None
    """the closure of the next step. `step` sets it; a caller that runs `algorithm` itself sets it
    before"""
    loss: Any = None
    """what the closure returned first in the last step, detached from its graph; None if it was not
    called"""

    def configure(self) -> None:
        """See `DistributedOptimizer`.

        Raises:
            ValueError: there are more participants than ranks, or the inner optimizer is not SGD.
        """
        super().configure()
        count, world_size = self.participants, self.group.world_size
        if count is not None and count > world_size:
            raise ValueError(f"{count} participants of {world_size} ranks\n\nhint: give fewer")
        self._check_is_plain_sgd()
        self.main, self.second = Trajectory("main"), Trajectory("second")

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        trajectories = declared_fields(self.main) + declared_fields(self.second)
        return [*super().declare(), *trajectories]

    def restart(self) -> None:
        """See `LocalMethod`: begin a round from the current parameters."""
        self.anchor = self.parameters
        self._reset_trajectories()

    def _reset_trajectories(self) -> None:
        self.main.reset()
        self.second.reset()

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        if self.group.rank not in self.ranks():
            # with another number of ranks, other ranks may participate
            self._reset_trajectories()

    def ranks(self) -> frozenset[int]:
        """Return the ranks of the current round, which each rank computes alone."""
        return choose_ranks(self.group.world_size, self.participants, self.seed, self.round)

    # --- local steps

    def step(self, closure: Any = None) -> Any:
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
        return self.loss

    @torch.no_grad()
    def local_step(self) -> None:
        """See `LocalMethod`: a step along each trajectory."""
        if self.closure is None:
            # a GradScaler does not pass one on
            raise TypeError(f"a step of {self.name} without a closure\n\nhint: call step(closure)")
        # a scheduler may have changed the momentum
        self._check_is_plain_sgd()
        self.loss = None
        if self.group.rank not in self.ranks():
            return
        trajectories = [(self.main, self.parameters)]
        if self.has_momentum:
            second = self.previous if self.second.point is None else self.second.point
            trajectories.append((self.second, second))
        # the first trajectory is evaluated first, because `loss` is that at the parameters
        points = [at for each, point in trajectories for at in (point, each.before)]
        found = self._gradients(self.closure, [at for at in points if at is not None])
        if found is None:
            # neither trajectory takes the step
            return
        gradients = iter(found)
        moves: list[tuple[Trajectory, Tensor, Tensor]] = []
        for each, point in trajectories:
            velocity = next(gradients)
            if each.velocity is not None:
                velocity.add_(each.velocity - next(gradients), alpha=self.local_momentum)
            moves.append((each, point, velocity))
        # the first trajectory last, so that its point remains in the parameters
        for move in reversed(moves):
            self._move(*move)

    def _move(self, trajectory: Trajectory, point: Tensor, velocity: Tensor) -> None:
        """Take a step of the inner optimizer from a point."""
        self.parameters = point
        gradients = self.flat.views(velocity)
        for parameter, gradient in zip(self.flat.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        self.inner.step()
        if trajectory is self.second:
            trajectory.point = self.parameters
        if self.local_momentum:
            trajectory.before, trajectory.velocity = point, velocity

    def _gradients(
        self, closure: Callable[[], Any], points: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return the gradients at several points, with one minibatch; None if one is not finite.

        The difference of two gradients of one minibatch has a small variance only if both use the
        same random numbers, for example for dropout. Every evaluation therefore begins with the
        same states of torch's generators, of the CPU and of the parameters' GPU, and with the same
        dense buffers of `module`, such as those of BatchNorm. At the end, the generators and
        buffers have the states after the first evaluation, and the parameters are unchanged.

        Args:
            closure: computes the loss and the gradients at the current parameters.
            points: parameters (n,).

        Returns:
            (n,) for each point, times `gradient_factor`, with zeros for missing gradients.
        """
        start, before = self.parameters, self._random_state()
        after, found = before, list[Tensor]()
        try:
            for point in points:
                self.parameters = point
                for parameter in self.flat.parameters:
                    parameter.grad = None
                if found:
                    self._set_random_state(before)
                # autocast may have cached copies of the parameters at another point
                torch.clear_autocast_cache()
                with torch.enable_grad():
                    loss = closure()
                if not found:
                    # a graph could not be copied by copy.deepcopy, and would keep activations
                    self.loss = loss.detach() if isinstance(loss, Tensor) else loss
                    after = self._random_state()
                if not self.check_gradients():
                    return None
                found.append(self.flat.read_gradients(self.flat.empty(), self.gradient_factor()))
            return found
        finally:
            self._set_random_state(after)
            self.parameters = start

    def _random_state(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return copies of the buffers and of the states of the generators."""
        device = self.flat.device
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return [each.clone() for each in self._buffers()], torch.get_rng_state(), gpu

    def _set_random_state(self, state: tuple[list[Tensor], Tensor, Tensor | None]) -> None:
        buffers, cpu, gpu = state
        for buffer, saved in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(saved)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.flat.device)

    def _buffers(self) -> list[Tensor]:
        return [] if self.module is None else [each for _, each in dense_buffers(self.module)]

    def _check_is_plain_sgd(self) -> None:
        """Check that the inner optimizer's step is the learning rate times the gradient.

        Raises:
            ValueError: it is another optimizer than SGD, or has momentum.
        """
        is_sgd = isinstance(self.inner, torch.optim.SGD)
        if not is_sgd or any(group["momentum"] for group in self.inner.param_groups):
            raise ValueError(
                f"{self.name} around {type(self.inner).__name__}{' with momentum' * is_sgd}"
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
        if self.second.point is not None:
            torch.sub(self.second.point, self.previous, out=change).add_(difference)

    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`."""
        count = self.flat.num_elements
        update = mean[:count]
        if self.has_momentum:
            update = self.momentum.add_(mean[count:]).lerp_(update, self.round_weight)
            self.previous.copy_(self.anchor)
        elif self.round_weight < 1:
            self.momentum = update = update.clone()
            self.previous, self.has_momentum = self.anchor.clone(), True
        self.anchor.sub_(update)
        self.discard(fragment)

    def discard(self, fragment: Fragment) -> None:
        """See `LocalMethod`: begin a round from the anchor."""
        whole = self.whole_vector()
        whole.is_finite = fragment.is_finite
        self.set_parameters(whole, self.anchor)
        self._reset_trajectories()
        self.round += 1


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
