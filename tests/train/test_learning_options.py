"""Options of the update of the weights: schedules, losses, clipping, decay and averages."""

import math
from dataclasses import replace

import pytest
import torch
from given_gradients import count_gradients
from torch.nn import functional
from torch.optim import lr_scheduler
from training import Stopped, Stopping, assert_same_weights, lines, planted, saved

from gcnzc.exchange import Group
from gcnzc.loader.seeds import Shares
from gcnzc.models.metrics import compute_loss
from gcnzc.train.config import TrainConfig
from gcnzc.train.optimizer_options import ONE_BIT
from gcnzc.train.optimizers import build_method
from gcnzc.train.run import train
from gcnzc.train.strategies import STRATEGIES
from gcnzc.train.tasks.node import balanced_weights
from gcnzc.train.schedules import Schedule, build_schedule


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 400, 2400, 8, 3)
    sizes = {"fanouts": (3, 3), "layers": 2, "hidden": 8, "batch_size": 30, "threads": 1}
    return TrainConfig(data=graph, **sizes, epochs=2, lr=0.01, dropout=0.2)


CHOICES = {
    "cosine": {"schedule": "cosine", "warmup_epochs": 1.5}
    | {"label_smoothing": 0.1, "class_weights": "balanced"},
    "step": {"schedule": "step", "step_epochs": 0.5, "optimizer": "onebit-adam"},
    "ema": {"average": "ema", "average_decay": 0.9, "norm": "batch"}
    | {"weight_decay": 0.1, "decay": "weights", "clip_gradients": 0.1},
    "swa": {"average": "swa", "average_start": 0.0, "norm": "batch", "label_inputs": 0.5},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_resumes_bit_for_bit(choice, config, tmp_path):
    config = replace(config, checkpoint_every_s=0, **CHOICES[choice])
    train(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", Stopping(2, 4))
    assert saved(tmp_path / "cut")["in_epoch"]
    train(replace(config, resume=tmp_path / "cut"), tmp_path / "cut")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    for mine, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "cut"), strict=True):
        for name in ("loss", "lr", "valid_accuracy"):
            assert mine.get(name) == other.get(name)


def rates(config, shares, begin=0):
    """The learning rate of each step of a run, from an epoch on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, found = Schedule(config, optimizer), []
    for epoch in range(begin, config.epochs):
        schedule.begin_epoch(epoch, shares, 0)
        for _ in range(len(shares)):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert schedule.last_lr(epoch) == found[-1]
    return found


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "step"])
def test_learning_rates_are_those_of_torch(kind):
    # ten steps an epoch
    config = TrainConfig(schedule=kind, epochs=6, warmup_epochs=1.5, step_epochs=2.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=1 / 15, total_iters=14)
    rest = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=45),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=45),
        # its epochs count from the start of the run
        "step": lambda: lr_scheduler.MultiStepLR(optimizer, [5, 25]),
    }[kind]()
    both = lr_scheduler.SequentialLR(optimizer, [warmup, rest], [15])
    expected = []
    for _ in range(60):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    shares = Shares(95, 10)
    found = rates(config, shares)
    assert found == pytest.approx(expected, abs=1e-9)
    # two workers with half the batch, a run that starts in the middle, and one of more epochs
    assert rates(config, Shares(95, 5, 1, 2)) == found
    assert rates(config, shares, begin=3) == found[30:]
    if kind == "cosine":
        assert rates(replace(config, epochs=12), shares)[-1] < 0.001 < found[-1]
    assert build_schedule(TrainConfig(), optimizer) is None


def test_the_rest_of_an_epoch_with_other_workers_has_its_learning_rates():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = TrainConfig(schedule="linear", epochs=2)
    schedule = Schedule(config, optimizer)
    # 40 of 80 seeds were used, in the first of two epochs
    schedule.begin_epoch(0, replace(Shares(80, 10, 0, 2), seeds_done=40), 0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75)


def test_balanced_classes_contribute_alike_to_the_loss():
    labels = torch.tensor([0] * 6 + [2] * 2)
    weights = balanced_weights(labels, 3)
    assert weights.tolist() == pytest.approx([8 / 12, 0, 2])
    logits = torch.randn(8, 3)
    loss = compute_loss(logits, labels, class_weights=weights, label_smoothing=0.1)
    # torch divides by the sum of the weights, which is 8 over all training nodes
    expected = functional.cross_entropy(logits, labels, weights, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    plain = functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(compute_loss(logits, labels, label_smoothing=0.1), plain)


def test_balanced_label_columns_weight_their_ones():
    nan = math.nan
    labels = torch.tensor([[1, 0, 1.0], [0, 0, nan], [0, nan, 1]])
    weights = balanced_weights(labels, 2)
    assert weights.tolist() == [2, 1, 1]
    logits = torch.randn(3, 3)
    known = ~labels.isnan()
    expected = functional.binary_cross_entropy_with_logits(
        logits[known], labels[known], pos_weight=weights.expand(3, 3)[known]
    )
    torch.testing.assert_close(compute_loss(logits, labels, class_weights=weights), expected)


def stepped(config, gradients):
    """The parameters of a small model after a step for each vector (12,) of gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = build_method(config, model, Group(), 100)
    for gradient in gradients:
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), gradient.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        count_gradients(optimizer)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


OPTIMIZERS = pytest.mark.parametrize(
    "options",
    [
        *(pytest.param({"optimizer": name}, id=name) for name in ("muon", *ONE_BIT)),
        *(
            pytest.param({"optimizer": each.optimizer or "adamw", "strategy": name}, id=name)
            for name, each in STRATEGIES.items()
            # it needs a closure, and rejects clipping
            if name != "fedglomo"
        ),
    ],
)


@OPTIMIZERS
def test_every_optimizer_clips_gradients(options):
    config = TrainConfig(lr=0.1, **options)
    generator = torch.Generator().manual_seed(1)
    large, small = (functional.normalize(torch.randn(12, generator=generator), dim=0) for _ in "ab")
    expected = stepped(config, [large * 2, small])
    found = stepped(replace(config, clip_gradients=2.0), [large * 50, small])
    plain = stepped(config, [large * 50, small])
    for mine, other, without in zip(found, expected, plain, strict=True):
        torch.testing.assert_close(mine, other)
        assert not torch.equal(mine, without)


@OPTIMIZERS
def test_only_weights_decay_in_every_optimizer(options):
    config = TrainConfig(weight_decay=0.5, lr=0.1, **options)
    before = stepped(config, [])
    for decay, moved in (("all", [True, True, True]), ("weights", [True, False, False])):
        after = stepped(replace(config, decay=decay), [torch.zeros(12)])
        # the last parameter, the shift of the normalization, is 0
        assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)][:3] == moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_epochs": 5, "epochs": 5}, "--warmup-epochs 5 with --epochs 5: the warm-up would"),
        ({"step_epochs": 0}, "--step-epochs must be above 0"),
        ({"clip_gradients": 0}, "--clip-gradients must be above 0, got 0"),
        ({"decay": "weights"}, "--decay weights has no effect with --weight-decay 0"),
        ({"step_factor": math.nan}, "--step-factor must be finite"),
    ],
)
def test_contradictions_and_values_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**options)
    assert "\n\nhint: " in str(error.value)
