"""Elements whose first gradient comes after the warm-up of a 1-bit optimizer."""

import itertools
import math
import statistics

import pytest
import torch
from optim.teams import of_group, step_all
from slow_cases import mark_slow
from torch import nn

from bench.strategies.late_elements import KINDS, LATE, METHODS, train
from gcnzc.optim import OneBitAdam

CASES = mark_slow(
    itertools.product(KINDS, METHODS, (1e-2, 1e-3), (60, 180)),
    lambda *case: case != ("embedding", "1-bit Adam", 1e-2, 60),
)


@pytest.mark.parametrize(("kind", "method", "lr", "warmup"), CASES)
def test_they_behave_like_those_that_had_gradients_in_the_warm_up(kind, method, lr, warmup):
    make, exact = METHODS[method]
    late = train(kind, make, lr, warmup)
    control = train(kind, make, lr, warmup, is_control=True)
    assert math.isfinite(late.late_step)
    assert not late.late_step > 1.5 * control.tensor_step
    # with a small learning rate or a long warm-up, even uncompressed optimizers may be far above it
    if (kind, lr, warmup) == ("embedding", 1e-2, 60):
        losses = [control.loss(warmup), train(kind, exact, lr, 0).loss()]
        assert late.loss() <= 10 * max(each for each in losses if math.isfinite(each))
    else:
        assert late.loss() < statistics.mean(late.losses[LATE : LATE + 5])


def late_run(num_steps, begin, warmup=4, late=slice(10, 20)):
    """Return parameters of 2 ranks after each step, and the mean gradients of late elements."""
    params = [nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2)]
    options = {"lr": 0.01, "warmup": warmup, "weight_decay": 0.0}
    optimizers = of_group(params, lambda each, group: OneBitAdam([each], group=group, **options))
    seen, gradients, sent = [], [], []
    generator = torch.Generator().manual_seed(0)
    for number in range(1, num_steps + 1):
        for each in params:
            each.grad = torch.randn(64, generator=generator)
            if number < begin:
                each.grad[late] = 0.0
        gradients.append((params[0].grad[late] + params[1].grad[late]) / 2)
        outcome = step_all(optimizers)
        sent.append(outcome.ledgers[0].bytes_sent)
        assert torch.equal(*params)
        seen.append(params[0].detach()[late].clone())
    return seen, gradients, sent, optimizers[0]


def test_while_they_settle_they_take_steps_of_adam_with_a_corrected_variance():
    begin, settling_steps = 8, 4
    seen, gradients, _, optimizer = late_run(20, begin)
    # pending at step 8, exchanged at step 9 with the gradient of that step
    first = gradients[begin - 1] + gradients[begin]
    momentum, variance, x = 0.1 * first, first.square() / 2, seen[begin - 1]
    for age in range(1, settling_steps + 1):
        step = begin + age
        if age > 1:
            gradient = gradients[step - 1]
            momentum = 0.9 * momentum + 0.1 * gradient
            variance = variance + (gradient.square() - variance) * 0.001 / (1 - 0.999**age)
        x = x - 0.01 * momentum / (1 - 0.9**step) / (variance.sqrt() + 1e-8)
        torch.testing.assert_close(seen[step - 1], x, rtol=1e-5, atol=1e-6)
    assert not len(optimizer.settling)
    assert optimizer.active is None


def test_their_gradients_are_exchanged_uncompressed_while_they_settle():
    _, _, sent, _ = late_run(20, 8)
    compressed = sent[-1]
    assert sent[13:] == [compressed] * 7
    # a sum over 2 ranks sends each element once, beside numbers of elements that are not finite
    extra = {each - compressed for each in sent[9:12]}
    assert len(extra) == 1
    assert 10 * 4 <= extra.pop() <= 10 * 4 + 32


@pytest.mark.parametrize("method", METHODS)
def test_runs_resume_bit_for_bit_while_they_settle(method):
    def made():
        params = [nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2)]
        make = METHODS[method][0]
        return params, of_group(params, lambda each, group: make([each], group, 0.01, 6))

    def take(params, optimizers, number):
        generator = torch.Generator().manual_seed(number)
        for each in params:
            each.grad = torch.randn(64, generator=generator)
            each.grad[10:20] *= number >= 20
            each.grad[40:44] *= number >= 24
        step_all(optimizers)

    params, optimizers = made()
    others = None
    for number in range(60):
        take(params, optimizers, number)
        if others is not None:
            take(*others, number)
        elif len(optimizers[0].settling):
            others = made()
            for optimizer, other in zip(optimizers, others[1], strict=True):
                other.load_state_dict(optimizer.state_dict())
            for each, other in zip(params, others[0], strict=True):
                other.data.copy_(each)
    assert others is not None
    assert not len(optimizers[0].settling)
    assert torch.equal(params[0], others[0][0])
    assert torch.equal(params[1], others[0][1])
