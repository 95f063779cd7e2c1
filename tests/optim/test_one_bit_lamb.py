"""1-bit LAMB against its equations, inactive elements, factors."""

import pytest
import torch
from optim.teams import of_group, step_all
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.optim import OneBitLamb

SHAPES = [(4, 3), (5,), (17,), (6, 6)]


def random_lists(seed, shapes=SHAPES, dtype=torch.float64, scales=None):
    """A random tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    scales = scales or [1.0] * len(shapes)
    return [
        torch.randn(shape, generator=generator, dtype=dtype) * scale
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def made(world_size, dtype=torch.float64, **options):
    """Parameters and optimizers of so many workers."""
    models = [
        [nn.Parameter(each) for each in random_lists(0, dtype=dtype)] for _ in range(world_size)
    ]
    return models, of_group(models, lambda model, group: OneBitLamb(model, group=group, **options))


def gradients_of(step, rank, model, scales=None):
    """Random ones, the same for a worker's step whenever it is asked."""
    shapes = [parameter.shape for parameter in model]
    return random_lists(1000 * (step + 1) + rank, shapes, model[0].dtype, scales)


def take_step(models, optimizers, step, change=None, scales=None):
    """One step on random gradients, which `change(rank, gradients)` may change in place."""
    for rank, model in enumerate(models):
        gradients = gradients_of(step, rank, model, scales)
        if change is not None:
            change(rank, gradients)
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
    step_all(optimizers)
    assert all(all(map(torch.equal, model, models[0])) for model in models)


def without(number, rank=None):
    """A change that leaves a tensor without a gradient, on one rank or on all."""

    def change(own, gradients):
        if rank in (None, own):
            gradients[number] = None

    return change


def mean_of(gradients):
    """Over the workers, of lists of gradients, with zeros where one is None."""
    means = []
    for each in zip(*gradients, strict=True):
        found = [gradient for gradient in each if gradient is not None]
        means.append(sum(found) / len(each) if found else None)
    return means


class PlainLamb:
    """LAMB, and what 1-bit LAMB does where nothing is left out, from the equations."""

    def __init__(self, parameters, lr, betas, eps, decay, trust_range, correct=True, warmup=None):
        self.parameters = [each.detach().clone() for each in parameters]
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.trust_range, self.correct, self.warmup = trust_range, correct, warmup
        self.steps = 0
        self.momenta = [torch.zeros_like(each) for each in parameters]
        self.variances = [torch.zeros_like(each) for each in parameters]
        self.fresh = []
        self.ratios = [[] for _ in parameters]
        self.factors = [1.0] * len(parameters)
        self.were_seen = [False] * len(parameters)

    def step(self, gradients):
        self.steps += 1
        is_frozen = bool(self.fresh)
        for place, gradient in enumerate(gradients):
            self.were_seen[place] |= gradient is not None
            if self.were_seen[place]:
                zeros = torch.zeros_like(self.momenta[place])
                self.move(place, zeros if gradient is None else gradient)
        if self.steps == self.warmup:
            self.variances = [each / self.missing(self.betas[1]) for each in self.variances]
            self.fresh = [each.clone() for each in self.variances]
        assert is_frozen or self.steps <= (self.warmup or self.steps)

    def missing(self, beta):
        return 1 - beta**self.steps if self.correct else 1.0

    def move(self, place, gradient):
        beta1, beta2 = self.betas
        values, momentum = self.parameters[place], self.momenta[place]
        momentum.copy_(beta1 * momentum + (1 - beta1) * gradient)
        moving = self.fresh[place] if self.fresh else self.variances[place]
        moving.copy_(beta2 * moving + (1 - beta2) * gradient**2)
        variance = self.variances[place] / (1 if self.fresh else self.missing(beta2))
        root = variance.sqrt() + self.eps
        straight = momentum / self.missing(beta1) / root
        update = straight + self.decay * values
        length, norm = float(values.norm()), float(update.norm())
        if not self.fresh:
            ratio = 1.0
            if length and norm:
                ratio = min(max(length / norm, self.trust_range[0]), self.trust_range[1])
                self.ratios[place].append(ratio)
            values -= self.lr * ratio * update
            return
        ratio, weight = 0.0, 0.0
        for each in self.ratios[place]:
            ratio, weight = 0.9 * ratio + 0.1 * each, 0.9 * weight + 0.1
        share = min(1.0, float(straight.norm()) / norm)
        factor = float((root / (self.fresh[place].sqrt() + self.eps)).max()) * share + 1 - share
        factor = min(max(factor, 0.5), 4.0)
        last = self.factors[place]
        self.factors[place] = min(max(factor, 0.9 * last), 1.1 * last)
        ratio /= weight if self.correct else 1.0
        values -= self.lr * ratio * self.factors[place] * update

    def check(self, model, tolerance=1e-12):
        for found, right in zip(model, self.parameters, strict=True):
            torch.testing.assert_close(found.detach(), right, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_worker_takes_the_steps_of_lamb(correct, decay):
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
    (model,), (optimizer,) = made(
        1, weight_decay=decay, trust_range=(0.5, 1.5), warmup=3, bias_correction=correct, **options
    )
    plain = PlainLamb(model, *options.values(), decay, (0.5, 1.5), correct)

    def change(_, gradients):
        gradients[1] = None  # never one
        if step % 3 == 0:
            gradients[2] = None

    for step in range(20):
        gradients = gradients_of(step, 0, model)
        change(0, gradients)
        plain.step(gradients)
        take_step([model], [optimizer], step, change)
        plain.check(model)
    assert not optimizer.is_frozen
    # the bounds bit for some steps, and not for all
    ratios = {ratio for each in plain.ratios for ratio in each}
    assert {0.5, 1.5} & ratios
    assert ratios - {0.5, 1.5}


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_compression_it_follows_its_equations_on_the_mean_gradient(correct, decay):
    options = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": decay, "variance_floor": 0.0}
    models, optimizers = made(3, warmup=5, compress=Dense(), bias_correction=correct, **options)
    plain = PlainLamb(models[0], 0.02, (0.8, 0.9), 1e-8, decay, (0.01, 10.0), correct, warmup=5)
    factors = []
    for rank, optimizer in enumerate(optimizers):
        # minibatches of different sizes
        optimizer.weight = 0.9 + 0.1 * rank
    for step in range(30):
        # gradients shrink, so that the fresh variance leaves the frozen one
        scales = [0.9 ** max(0, step - 8) * scale for scale in (1.0, 1e-2, 3.0, 0.1)]
        own = [
            [(0.9 + 0.1 * rank) * each for each in gradients_of(step, rank, model, scales)]
            for rank, model in enumerate(models)
        ]
        own[0][2] = None
        plain.step(mean_of(own))
        take_step(models, optimizers, step, without(2, 0), scales)
        factors.append(optimizers[0].factor.tolist())
        plain.check(models[0], 1e-10)
    assert optimizers[0].is_frozen
    torch.testing.assert_close(factors[-1], plain.factors, rtol=1e-9, atol=0)
    assert len({each[0] for each in factors[10:]}) > 5


def test_scalings_give_all_tensors_the_same_magnitude_and_none_dominates():
    scales = [1e-4, 1.0, 1e-2, 1e-30]
    models, optimizers = made(2, warmup=4, compress=Sign(), betas=(0.9, 0.9))
    for step in range(4):
        take_step(models, optimizers, step, scales=scales)
    optimizer = optimizers[0]
    sizes = [parameter.numel() for parameter in models[0]]
    magnitudes = torch.stack(
        [each.square().mean().sqrt() for each in optimizer.momentum.split(sizes)]
    )
    assert magnitudes[:3].max() / magnitudes[:3].min() > 1000
    scaled = (optimizer.scaling * magnitudes)[:3]
    torch.testing.assert_close(scaled, magnitudes.mean().expand(3), rtol=1e-12, atol=0)
    # a tensor with tiny momentum at the freeze has the largest scaling
    assert optimizer.scaling.argmax() == 3
    for step in range(4, 8):
        take_step(models, optimizers, step)
    assert [each.skipped for each in optimizers] == [0, 0]
    assert all(parameter.isfinite().all() for parameter in models[0])


def table_with(rows):
    """A change that leaves gradients to these rows of the first tensor alone."""

    def change(_, gradients):
        kept = torch.zeros_like(gradients[0])
        kept[rows] = gradients[0][rows]
        gradients[0] = kept

    return change


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rows_without_a_gradient_are_inactive(decay):
    options = {"weight_decay": decay, "lr": 0.01, "betas": (0.9, 0.9)}
    models, optimizers = made(2, warmup=3, compress=Sign(), **options)
    before = models[0][0].detach()[2:].clone()
    for step in range(15):
        # gradients grow, so that factors fall
        scales = [3.0 if step > 3 else 1.0] * len(SHAPES)
        take_step(models, optimizers, step, table_with(slice(0, 2)), scales)
    now = models[0][0].detach()[2:]
    # decay alone shrinks them, by at most lr times the largest ratio and factor a step
    assert torch.all(now.abs() <= before.abs())
    assert torch.all(now.abs() >= before.abs() * (1 - 0.01 * decay * 10 * 4) ** 15)
    assert torch.equal(now, before) == (decay == 0)
    assert not torch.equal(models[0][0][:2], random_lists(0)[0][:2])
    # that of an inactive element, eps / eps, would keep it at 1
    assert optimizers[0].factor[0] < 0.8


@pytest.mark.parametrize("reactivate", ["step", "refresh"])
def test_rows_are_reactivated_by_a_gradient(reactivate):
    options = {"weight_decay": 0.0, "reactivate": reactivate, "lr": 0.01}
    models, optimizers = made(2, warmup=3, compress=Sign(), **options)
    before = models[0][0].detach()[2:].clone()
    for step in range(12):
        take_step(models, optimizers, step, table_with(slice(0, 2 if step < 5 else 4)))
    moved = (models[0][0].detach()[2:] - before).abs().max()
    assert moved == 0 if reactivate == "refresh" else 0 < moved < 1


def test_an_unused_tensor_is_inactive_as_a_whole_and_reactivated():
    models, optimizers = made(2, warmup=3, compress=Sign(), lr=0.01)
    before = models[0][1].detach().clone()
    for step in range(6):
        take_step(models, optimizers, step, without(1))
    assert torch.equal(models[0][1], before)
    for step in range(6, 14):
        take_step(models, optimizers, step)
    optimizer = optimizers[0]
    assert 0 < (models[0][1].detach() - before).abs().max() < 1
    # its own warm-up has as many steps as the first
    assert optimizer.trust_weight[1] == pytest.approx(1 - 0.9**3)
    assert 0.01 <= optimizer.trust[1] / optimizer.trust_weight[1] <= 10


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_factors_stay_in_range_if_gradients_vanish(eps):
    options = {"betas": (0.5, 0.5), "eps": eps, "weight_decay": 0.0, "dtype": torch.float32}
    models, optimizers = made(2, warmup=3, compress=Dense(), **options)
    before = [1.0] * len(SHAPES)
    for step in range(150):
        take_step(models, optimizers, step, scales=[0.0] * len(SHAPES) if step > 4 else None)
        factors = optimizers[0].factor.tolist()
        for factor, last in zip(factors, before, strict=True):
            assert 0.5 <= factor <= 4
            assert 0.9 * last * (1 - 1e-12) <= factor <= 1.1 * last * (1 + 1e-12)
        before = factors
    # the fresh variance is no more than 2^-140 of what it was, and the parameters are numbers
    assert optimizers[0].fresh.max() < 1e-37
    assert all(parameter.isfinite().all() for parameter in models[0])
    assert max(before) > 1
