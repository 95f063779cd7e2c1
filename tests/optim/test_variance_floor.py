"""Elements with a small variance that share a scale with others."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gcnzc.compress import Blocks, Dense, Sign, TopK
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import OneBitAdam, ZeroOneAdam
from gcnzc.optim.synchronous.inactive import raise_to_neighbours

STEPS = 60


@pytest.mark.parametrize("width", [1, 4, 7, 50, None])
def test_small_parameters_are_raised_to_all_blocks_that_may_contain_them(width):
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.rand(n, dtype=torch.float64, generator=generator) for n in (9, 3, 20, 18)]
    parameters[1] *= 1e-6
    parameters[3] *= 1e-3
    parameters[2][::7] = 0
    before = torch.cat(parameters)
    own = [float(each.sum() / (each > 0).sum()) for each in parameters for _ in each]
    raised = before.clone()
    raise_to_neighbours(raised, torch.tensor(own, dtype=torch.float64), width)
    size = min(width or 50, 50)
    means = [float(each.sum() / max((each > 0).sum(), 1)) for each in before.split(size)]
    for index, (old, new) in enumerate(zip(before.tolist(), raised.tolist(), strict=True)):
        number = index // size
        limit = 0.01 * max(means[max(number - 1, 0) : number + 2])
        is_raised = old > 0 and own[index] < limit
        assert new == pytest.approx(max(old, limit) if is_raised else old, rel=1e-12)
    if size >= 7:
        assert not torch.equal(raised[9:12], before[9:12])
    assert torch.equal(raised[12:32], before[12:32])


def test_codecs_state_how_many_elements_share_a_scale():
    assert Sign().scale_elements == 4096
    assert Sign(block=None).scale_elements is None
    assert Blocks("int8").scale_elements == 256
    assert Dense(torch.bfloat16).scale_elements == TopK(0.1).scale_elements == 1


class Normalized(nn.Sequential):
    """A model whose first bias has no effect, so that its gradients are rounding errors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def train(models, optimizers):
    for step in range(STEPS):
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(64, 20, generator=generator)
            model.zero_grad()
            cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        lockstep([each.algorithm() for each in optimizers])
    lockstep([each.finalize_algorithm() for each in optimizers])


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam])
@pytest.mark.parametrize("compress", [Sign(), Sign(block=None), Blocks("int4", has_feedback=True)])
def test_a_bias_before_batch_normalization_stays_small(kind, compress):
    models = [Normalized() for _ in range(2)]
    optimizers = [
        kind(
            model.parameters(),
            0.01,
            compress=compress,
            total_steps=STEPS,
            group=Group(rank, 2),
            module=model,
        )
        for rank, model in enumerate(models)
    ]
    train(models, optimizers)
    # without the floor it is above 1,000
    assert float(models[0][0].bias.detach().abs().max()) < 2
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(1))
    model = models[0].eval()
    assert float((model(x).argmax(1) == x[:, :4].argmax(1)).float().mean()) > 0.85
