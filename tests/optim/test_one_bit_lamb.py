"""1-bit LAMB against its equations, DeepSpeed's trajectory, faults and resumed runs."""

import pytest
import torch
from optim.oracle import fixture, followed, lengths
from torch import nn

from bench.network.deepspeed_oracles import OneBitLambDeepSpeed, RefedPaddedSign
from gcnzc.compress import Dense, Sign
from gcnzc.exchange import Group, lockstep
from gcnzc.optim.synchronous.one_bit_lamb import MAX_SCALING, OneBitLamb

SHAPES = [(4, 3), (5,), (17,), (6, 6)]


def random_lists(seed, shapes=SHAPES, dtype=torch.float64, scales=None):
    """A random tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    scales = scales or [1.0] * len(shapes)
    return [
        torch.randn(shape, generator=generator, dtype=dtype) * scale
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def made(world_size, shapes=SHAPES, dtype=torch.float64, group=None, **options):
    """Parameters and optimizers of so many workers."""
    models = [
        [nn.Parameter(each) for each in random_lists(0, shapes, dtype)] for _ in range(world_size)
    ]
    return models, [
        OneBitLamb(
            model if group is None else group(model), group=Group(rank, world_size), **options
        )
        for rank, model in enumerate(models)
    ]


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
    return lockstep([optimizer.algorithm() for optimizer in optimizers])


def mean_of(gradients):
    """Over the workers, of lists of gradients, with zeros where one is None."""
    means = []
    for each in zip(*gradients, strict=True):
        found = [gradient for gradient in each if gradient is not None]
        means.append(sum(found) / len(each) if found else None)
    return means


def are_equal(one, other):
    return all(map(torch.equal, one, other))


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
                self.move(
                    place, torch.zeros_like(self.momenta[place]) if gradient is None else gradient
                )
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


def test_it_follows_deepspeed():
    recorded = fixture("onebitlamb")
    hyper = recorded["hyper"]

    def make(model, group):
        return OneBitLambDeepSpeed(
            model,
            lr=hyper["lr"],
            betas=tuple(hyper["betas"]),
            weight_decay=hyper["weight_decay"],
            trust_range=(hyper["min_coeff"], hyper["max_coeff"]),
            warmup=hyper["freeze_step"],
            compress=RefedPaddedSign((sum(lengths(recorded)),)),
            bias_correction=False,
            variance_floor=0.0,
            group=group,
        )

    for step, optimizers, difference in followed(recorded, make):
        # exact up to step 10; one unit in the last place of an element at step 11
        assert difference == 0 if step < 10 else difference <= 1.2e-7, step
        dense = [*recorded["dense_allreduce_at_step"], False]
        assert optimizers[0].is_gradient_step == dense[step + 1]


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
        for found, right in zip(model, plain.parameters, strict=True):
            torch.testing.assert_close(found.detach(), right, rtol=1e-12, atol=1e-14)
    assert not optimizer.is_frozen
    # the bounds bit for some steps, and not for all
    ratios = {ratio for each in plain.ratios for ratio in each}
    assert {0.5, 1.5} & ratios
    assert ratios - {0.5, 1.5}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_warm_up_is_lamb_on_the_mean_gradient(world_size):
    models, optimizers = made(world_size, lr=0.05, warmup=100)
    plain = PlainLamb(models[0], 0.05, (0.9, 0.999), 1e-8, 0.01, (0.01, 10.0))
    # minibatches of different sizes
    weights = [1 + 0.1 * (rank - (world_size - 1) / 2) for rank in range(world_size)]
    for step in range(12):
        gradients = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.weight = weights[rank]
            gradients.append([each * weights[rank] for each in gradients_of(step, rank, model)])
        gradients[0][2] = None
        plain.step(mean_of(gradients))
        take_step(
            models,
            optimizers,
            step,
            lambda rank, own: own.__setitem__(2, None if rank == 0 else own[2]),
        )
    for model in models:
        assert are_equal(model, models[0])
    for found, right in zip(models[0], plain.parameters, strict=True):
        torch.testing.assert_close(found.detach(), right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_compression_it_follows_its_equations_after_the_freeze(correct, decay):
    models, optimizers = made(
        3, lr=0.02, betas=(0.8, 0.9), weight_decay=decay, warmup=5, compress=Dense(),
        bias_correction=correct, variance_floor=0.0,
    )  # fmt: skip
    plain = PlainLamb(models[0], 0.02, (0.8, 0.9), 1e-8, decay, (0.01, 10.0), correct, warmup=5)
    factors = []
    for step in range(30):
        # gradients shrink, so that the fresh variance leaves the frozen one
        scales = [0.9 ** max(0, step - 8) * scale for scale in (1.0, 1e-2, 3.0, 0.1)]
        plain.step(
            mean_of([gradients_of(step, rank, each, scales) for rank, each in enumerate(models)])
        )
        take_step(models, optimizers, step, scales=scales)
        factors.append(optimizers[0].factor.tolist())
        for found, right in zip(models[0], plain.parameters, strict=True):
            torch.testing.assert_close(found.detach(), right, rtol=1e-10, atol=1e-12)
    assert optimizers[0].is_frozen
    torch.testing.assert_close(factors[-1], plain.factors, rtol=1e-9, atol=0)
    assert len({each[0] for each in factors[10:]}) > 5


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_replicas_stay_equal_with_two_collectives_per_step(world_size):
    options = {"warmup": 3, "dtype": torch.float32}
    shapes = [*SHAPES, (0,), (300,)]
    models, optimizers = made(world_size, shapes=shapes, compress=Sign(), **options)
    for step in range(10):
        entries = take_step(models, optimizers, step).ledgers[0].entries
        assert all(are_equal(model, models[0]) for model in models)
        shared, *others = (optimizer.snapshot()["shared"] for optimizer in optimizers)
        for name, value in shared.items():
            for other in others:
                assert torch.equal(torch.as_tensor(other[name]), torch.as_tensor(value)), name
        if step >= 3:
            sent = sum(entry.bytes_sent for entry in entries.values())
            assert {kind: entry.requests for kind, entry in entries.items()} == {
                "AllToAll": 1,
                "AllGather": 1,
            }
            assert sent == Sign().bytes_sent(optimizers[0].flat.num_elements, world_size, extras=2)


def test_scalings_give_all_tensors_the_same_magnitude():
    scales = [1e-4, 1.0, 1e-2, 1e-1]
    models, optimizers = made(2, warmup=4, compress=Dense(), betas=(0.9, 0.9))
    for step in range(4):
        take_step(models, optimizers, step, scales=scales)
    optimizer = optimizers[0]
    momenta = optimizer.flat.views(optimizer.momentum)
    magnitudes = torch.stack([each.square().mean().sqrt() for each in momenta])
    assert magnitudes.max() / magnitudes.min() > 1000
    torch.testing.assert_close(
        optimizer.scaling * magnitudes, magnitudes.mean().expand(4), rtol=1e-12, atol=0
    )


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
    asleep = models[0][0].detach()[2:].clone()
    for step in range(15):
        # gradients grow, so that factors fall
        scales = [3.0 if step > 3 else 1.0] * len(SHAPES)
        take_step(models, optimizers, step, table_with(slice(0, 2)), scales)
    now = models[0][0].detach()[2:]
    # decay alone shrinks them, by at most lr times the largest ratio and factor a step
    assert torch.all(now.abs() <= asleep.abs())
    assert torch.all(now.abs() >= asleep.abs() * (1 - 0.01 * decay * 10 * 4) ** 15)
    assert torch.equal(now, asleep) == (decay == 0)
    assert not torch.equal(models[0][0][:2], random_lists(0)[0][:2])
    # that of a sleeping element, eps / eps, would keep it at 1
    assert optimizers[0].factor[0] < 0.8


@pytest.mark.parametrize("reactivate", ["step", "refresh"])
def test_rows_are_reactivated_by_a_gradient(reactivate):
    models, optimizers = made(
        2, warmup=3, compress=Sign(), weight_decay=0.0, reactivate=reactivate, lr=0.01
    )
    before = models[0][0].detach()[2:].clone()
    for step in range(12):
        rows = slice(0, 2) if step < 5 else slice(0, 4)
        take_step(models, optimizers, step, table_with(rows))
        assert all(are_equal(model, models[0]) for model in models)
        assert (optimizers[0].active is None) == (step < 2 or (reactivate == "step" and step > 7))
    moved = (models[0][0].detach()[2:] - before).abs().max()
    if reactivate == "refresh":
        assert moved == 0
    else:
        assert 0 < moved < 1
        # known from their first gradient alone, as the frozen variance of them is
        assert torch.all(optimizers[0].fresh > 0)


def test_an_unused_tensor_is_inactive_as_a_whole_and_reactivated():
    models, optimizers = made(2, warmup=3, compress=Sign(), lr=0.01)
    before = models[0][1].detach().clone()
    for step in range(6):
        take_step(models, optimizers, step, lambda _, gradients: gradients.__setitem__(1, None))
    assert torch.equal(models[0][1], before)
    scaling, trust = optimizers[0].scaling, optimizers[0].trust_weight
    assert scaling[1] == 0
    assert trust[1] == 0
    for step in range(6, 14):
        take_step(models, optimizers, step)
    optimizer = optimizers[0]
    assert all(are_equal(model, models[0]) for model in models)
    assert 0 < (models[0][1].detach() - before).abs().max() < 1
    # its own warm-up has as many steps as the first
    assert optimizer.trust_weight[1] == pytest.approx(1 - 0.9**3)
    assert 0.01 <= optimizer.trust[1] / optimizer.trust_weight[1] <= 10
    momenta = [each.square().mean().sqrt() for each in optimizer.flat.views(optimizer.momentum)]
    sent = optimizer.scaling * torch.stack(momenta)
    assert 0.1 < sent[1] / sent.mean() < 10


def test_a_tensor_with_tiny_momentum_at_the_freeze_does_not_dominate_others():
    models, optimizers = made(2, warmup=4, compress=Sign())
    quiet = [1.0, 1e-30, 1.0, 1.0]
    for step in range(8):
        take_step(models, optimizers, step, scales=quiet if step < 4 else None)
    assert optimizers[0].scaling[1] == MAX_SCALING
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]
    assert all(parameter.isfinite().all() for parameter in models[0])


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_factors_stay_in_range_if_gradients_vanish(eps):
    models, optimizers = made(
        2, warmup=3, compress=Dense(), betas=(0.5, 0.5), eps=eps, weight_decay=0.0,
        dtype=torch.float32,
    )  # fmt: skip
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


def test_parameters_of_other_dtypes_and_of_no_elements_take_part():
    models = [
        [
            nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)),
            nn.Parameter(torch.ones(0)),
            nn.Parameter(torch.ones(5)),
        ]
        for _ in range(2)
    ]
    optimizers = [
        OneBitLamb(model, lr=0.1, warmup=2, compress=Sign(), group=Group(rank, 2))
        for rank, model in enumerate(models)
    ]
    for step in range(5):
        for rank, model in enumerate(models):
            for parameter, gradient in zip(model, gradients_of(step, rank, model), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
        lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert are_equal(*models)
    assert models[0][0].dtype == torch.bfloat16
    assert all(torch.all((each != 1) & each.isfinite()) for each in models[0])
