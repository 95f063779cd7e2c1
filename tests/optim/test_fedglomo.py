"""FedGLOMO: the rounds of the paper, its closure, participants, errors."""

import copy

import numpy as np
import pytest
import torch
from optim.teams import Everything, batches, loss_of, of_group, share_of, team, vector_of
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import FedGLOMO
from gcnzc.optim.fedglomo import choose_ranks

LR = 0.05


def sgd(parameters, decay=0.0):
    return torch.optim.SGD(parameters, lr=LR, weight_decay=decay)


def exact(**options):
    return lambda inner, group: FedGLOMO(inner, group, compress=None, **options)


def closure_of(model, rows):
    def closure():
        model.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss.item()

    return closure


# of the reference: columns, rows of a minibatch
COLUMNS, ROWS, DECAY = 4, 6, 0.1


def minibatch(step, rank):
    generator = np.random.default_rng([step, rank])
    inputs = generator.normal(size=(ROWS, COLUMNS))
    return inputs, inputs @ np.arange(COLUMNS) + rank + generator.normal(size=ROWS)


def slope(weights, step, rank):
    """The gradient of the mean square error, and of the weight decay."""
    inputs, targets = minibatch(step, rank)
    errors = inputs @ weights - targets
    return 2 * inputs.T @ errors / ROWS + DECAY * weights


def reference_run(start, first_step, rank, local_steps, momentum):
    """The change of the parameters over a round, from a starting point."""
    weights, before, velocity = start.copy(), None, None
    for step in range(first_step, first_step + local_steps):
        here = slope(weights, step, rank)
        if velocity is not None:
            here = here + momentum * (velocity - slope(before, step, rank))
        before, velocity = weights, here
        weights = weights - LR * velocity
    return start - weights


def reference(start, chosen, *, local_steps, round_weight, local_momentum):
    """The parameters after each round, in which the ranks `chosen` take part."""
    weights, previous, update, found = start, None, None, []
    for number, ranks in enumerate(chosen):
        options = number * local_steps, local_steps, local_momentum
        runs = [reference_run(weights, options[0], rank, *options[1:]) for rank in ranks]
        difference = np.mean(runs, axis=0)
        if update is None:
            update = difference
        else:
            second = [reference_run(previous, options[0], rank, *options[1:]) for rank in ranks]
            change = difference - np.mean(second, axis=0)
            update = round_weight * difference + (1 - round_weight) * (update + change)
        previous, weights = weights, weights - update
        found.append(weights)
    return found


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"local_steps": 3}),
        (2, {"local_steps": 2, "round_weight": 0.3, "local_momentum": 1.0}),
        (3, {"local_steps": 4, "participants": 2, "seed": 5}),
        (5, {"local_steps": 3, "participants": 1, "round_weight": 0.9, "local_momentum": 0.4}),
        (3, {"local_steps": 1, "round_weight": 0.2, "local_momentum": 0.0}),
        (3, {"local_steps": 3, "round_weight": 1, "participants": 2}),
    ],
)
def test_rounds_are_those_of_the_paper(world_size, options):
    rounds = 5
    models = [nn.Linear(COLUMNS, 1, bias=False).double() for _ in range(world_size)]
    make = lambda each, group: exact(**options)(sgd(each.parameters(), DECAY), group)  # noqa: E731
    optimizers = of_group(models, make)
    start = models[0].weight.detach().numpy()[0].copy()
    seen = []

    def steps(rank):
        model, optimizer = models[rank], optimizers[rank]
        yield from optimizer.broadcast_model_algorithm()
        for step in range(rounds * options["local_steps"]):
            inputs, targets = map(torch.from_numpy, minibatch(step, rank))

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = (model(inputs)[:, 0] - targets).square().mean()
                loss.backward()
                return loss

            optimizer.closure = closure
            yield from optimizer.algorithm()
            if (step + 1) % options["local_steps"] == 0:
                seen.append((step // options["local_steps"], vector_of(model).numpy().copy()))

    lockstep([steps(rank) for rank in range(world_size)])
    given = {name: options.pop(name, None) for name in ("participants", "seed")}
    chosen = [
        sorted(choose_ranks(world_size, given["participants"], given["seed"] or 0, number))
        for number in range(rounds)
    ]
    expected = reference(start, chosen, **{"round_weight": 0.5, "local_momentum": 0.8, **options})
    assert len(seen) == rounds * world_size
    for number, found in seen:
        np.testing.assert_allclose(found, expected[number], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"round_weight": 1, "local_momentum": 0}, [1, 1, 1, 1, 1, 1]),
        ({"round_weight": 1}, [1, 2, 2, 1, 2, 2]),
        ({"local_momentum": 0}, [1, 1, 1, 2, 2, 2]),
        ({}, [1, 2, 2, 2, 4, 4]),
    ],
)
def test_gradients_are_computed_only_where_they_are_needed(options, calls):
    model = Everything()
    optimizer = exact(local_steps=3, **options)(sgd(model.parameters()), Group())
    found = []
    for rows in batches(6):
        compute, points = closure_of(model, rows), []

        def closure(compute=compute, points=points):
            points.append(vector_of(model).clone())
            return compute()

        at, expected = vector_of(model).clone(), loss_of(model, rows).item()
        # the loss at the parameters of the step, which are the first point
        assert optimizer.step(closure) == expected
        assert torch.equal(points[0], at)
        found.append(len(points))
    assert found == calls
    # one vector at the end of a round, or the parameters' two with their momentum
    vectors = 1 if options.get("round_weight") == 1 else 3
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert optimizer.state_bytes == vectors * count * 8


class Noisy(nn.Module):
    """With dropout, whose masks it keeps, and BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)
        self.masks = []

    def forward(self, rows):
        mask = self.drop(torch.ones(len(rows), 8))
        self.masks.append(mask)
        return self.last(self.norm(self.first(rows)) * mask)


def noisy_loss(model, step):
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return model(rows).square().mean()


def test_evaluations_of_a_step_use_the_same_masks_and_update_buffers_once():
    model = Noisy()
    optimizer = exact(local_steps=2, module=model)(sgd(model.parameters()), Group())
    torch.manual_seed(7)
    counts = []
    for step in range(6):
        before, state = copy.deepcopy(model), torch.get_rng_state()
        model.masks.clear()

        def closure(step=step):
            model.zero_grad()
            loss = noisy_loss(model, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        counts.append(len(model.masks))
        assert all(torch.equal(mask, model.masks[0]) for mask in model.masks)
        after = torch.get_rng_state()
        # one evaluation of a model that is not trained
        torch.set_rng_state(state)
        assert torch.equal(noisy_loss(before, step), loss)
        assert torch.equal(torch.get_rng_state(), after)
        assert all(map(torch.equal, model.buffers(), before.buffers()))
    assert counts == [1, 2, 2, 4, 2, 4]
    assert model.norm.num_batches_tracked == 6


@pytest.mark.parametrize("failing", range(4))
def test_an_error_of_the_closure_changes_nothing(failing):
    model = Noisy()
    optimizer = exact(local_steps=2, module=model)(sgd(model.parameters()), Group())
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls == limit:
            raise ArithmeticError
        model.zero_grad()
        noisy_loss(model, calls).backward()

    limit = 0
    for _ in range(3):
        optimizer.step(closure)
    limit = calls + failing + 1
    before = repr([list(model.parameters()), optimizer.snapshot()])
    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert repr([list(model.parameters()), optimizer.snapshot()]) == before
    assert optimizer.closure is None
    limit = 0
    optimizer.step(closure)


def test_participants_are_drawn_evenly_by_seed_and_round():
    chosen = [choose_ranks(8, 2, 3, number) for number in range(400)]
    assert all(len(ranks) == 2 for ranks in chosen)
    counts = np.bincount([rank for ranks in chosen for rank in ranks], minlength=8)
    # 100 expected, with a standard deviation of 8.7
    assert counts.min() > 65
    assert counts.max() < 135
    assert chosen != [choose_ranks(8, 2, 4, number) for number in range(400)]
    assert chosen[7] == choose_ranks(8, 2, 3, 7)


def test_a_rank_that_does_not_participate_computes_nothing():
    models, optimizers = team(3, exact(local_steps=2, participants=1), sgd)
    calls = [0, 0, 0]

    def steps(rank):
        model, optimizer = models[rank], optimizers[rank]
        yield from optimizer.broadcast_model_algorithm()
        for rows in batches(6):
            compute = closure_of(model, share_of(rows, optimizer.group))

            def closure(compute=compute):
                calls[rank] += 1
                return compute()

            before = calls[rank]
            optimizer.closure = closure
            yield from optimizer.algorithm()
            assert (optimizer.loss is None) == (calls[rank] == before)

    lockstep([steps(rank) for rank in range(3)])
    # 3 evaluations of the first round, 6 of each other one
    rounds = [next(iter(choose_ranks(3, 1, 0, number))) for number in range(3)]
    for rank in range(3):
        assert calls[rank] == sum(
            (3, 6, 6)[number] for number in range(3) if rounds[number] == rank
        )


def test_only_sgd_without_momentum_is_wrapped_and_steps_need_a_closure():
    model = nn.Linear(2, 2)
    for inner, kind in (
        (torch.optim.AdamW(model.parameters()), "AdamW\n"),
        (torch.optim.SGD(model.parameters(), momentum=0.9), "SGD with momentum"),
    ):
        with pytest.raises(ValueError, match=rf"around {kind}(?s:.*)hint: give torch.optim.SGD"):
            FedGLOMO(inner, Group())
    optimizer = FedGLOMO(sgd(model.parameters()), Group())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TypeError, match=r"without a closure\n\nhint: call step\(closure\)"):
        optimizer.step()
    # such as OneCycleLR sets it
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="SGD with momentum"):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum().backward())
