"""Evaluate a closure at several points in one step, with the same random numbers.

The difference of two gradients of one minibatch has a small variance only if both use the same
random numbers, for example for dropout.

Notation: n elements of the flat parameter vector.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.sync import dense_buffers
from gcnzc.optim.strategy.strategy import Strategy


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
