"""Muon and AdamW in one optimizer, alone and in optimizers that exchange."""

import copy
import pickle

import numpy as np
import pytest
import torch
from optim.teams import saved, vector_of
from torch import nn

from gcnzc.optim import Muon

COEFFICIENTS = 3.4445, -4.7750, 2.0315


def muon(parameters):
    return Muon(parameters, lr=0.01)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4), nn.Linear(4, 4))


def backward(model, seed):
    model.zero_grad()
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    model(rows).square().mean().backward()


def take_steps(model, optimizer, steps, begin=0):
    for number in range(begin, begin + steps):
        backward(model, number)
        optimizer.step()
    return vector_of(model)


def test_a_step_is_that_of_torchs_optimizers_bit_for_bit():
    model, other = build(), build()
    optimizer = Muon(model.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9, eps=1e-6)
    matrices = [each for each in other.parameters() if each.ndim == 2]
    vectors = [each for each in other.parameters() if each.ndim != 2]
    options = {"lr": 0.02, "weight_decay": 0.1}
    first = torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **options)
    second = torch.optim.AdamW(vectors, eps=1e-6, **options)
    for number in range(5):
        take_steps(model, optimizer, 1, number)
        backward(other, number)
        first.step()
        second.step()
        assert torch.equal(vector_of(model), vector_of(other))


def test_a_step_follows_the_formula():
    generator = np.random.default_rng(0)
    start, momentum = generator.normal(size=(5, 8)), np.zeros((5, 8))
    parameter = nn.Parameter(torch.tensor(start))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        gradient = generator.normal(size=(5, 8))
        before = parameter.detach().numpy().copy()
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * momentum
        update /= np.linalg.norm(update)
        a, b, c = COEFFICIENTS
        for _ in range(5):
            gram = update @ update.T
            update = a * update + (b * gram + c * gram @ gram) @ update
        expected = before * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 8**0.5 * update
        # the iterations are in bfloat16
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=0.01)
        assert np.abs(update).max() > 0.3


def rules(optimizer):
    """For each group, its rule and the shapes of its parameters."""
    return [
        (group["use_muon"], [tuple(each.shape) for each in group["params"]])
        for group in optimizer.param_groups
    ]


def test_groups_are_split_by_the_rule():
    model = build()
    expected = [(True, [(9, 6), (4, 9), (4, 4)]), (False, [(9,), (9,), (9,), (4,), (4,)])]
    assert rules(Muon(model.parameters())) == expected
    assert rules(Muon(model.named_parameters())) == expected
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": [model[2].weight], "use_muon": False},
        {"params": model[3].weight},
        {"params": [model[3].bias]},
    ]
    optimizer = Muon(groups, weight_decay=0.25)
    shapes = [(9, 6)], [(9,)], [(4, 9)], [(4, 4)], [(4,)]
    assert rules(optimizer) == list(zip((True, False, False, True, False), shapes, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 1e-3, 1e-3, 1e-3]
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25}


def test_a_model_tells_weights_from_embeddings_and_vectors():
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(5, 4),
            "bag": nn.EmbeddingBag(6, 4),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    model.scores = nn.Parameter(torch.zeros(2, 4))
    optimizer = Muon(model.parameters(), module=model)
    assert rules(optimizer)[0] == (True, [(12, 4), (4, 4)])
    assert {(5, 4), (6, 4), (2, 4)} <= set(rules(optimizer)[1][1])


def test_groups_may_be_added():
    model = build()
    optimizer = Muon(model[:3].parameters())
    with pytest.raises(ValueError, match=r"(?s)matrices and other parameters\n\nhint: add a group"):
        optimizer.add_param_group({"params": model[3].parameters()})
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.add_param_group({"params": model[3].bias, "use_muon": True})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [model[3].weight], "lr": 0.5})
    optimizer.add_param_group({"params": [model[3].bias]})
    assert rules(optimizer)[2:] == [(True, [(4, 4)]), (False, [(4,)])]
    before = vector_of(model)
    assert (take_steps(model, optimizer, 1) != before).all()


def test_a_version_of_torch_without_muon_is_rejected(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"(?s)has no Muon\n\nhint: install torch 2\.9"):
        Muon(build().parameters())


def test_a_state_resumes_bit_for_bit():
    model = build()
    optimizer = Muon(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(3):
        take_steps(model, optimizer, 1, number)
        schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    other = copy.deepcopy(model)
    again = Muon(other.parameters(), lr=7.0)
    again.load_state_dict(saved(optimizer.state_dict()))
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = take_steps(model, optimizer, 3, 3)
    for each, its in ((other, again), *pairs):
        assert torch.equal(take_steps(each, its, 3, 3), expected)
