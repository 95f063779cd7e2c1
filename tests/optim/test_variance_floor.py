"""Elements with a small variance that share a scale with others."""

import pytest
import torch
from optim.teams import finalize, of_group, step_all
from torch import nn
from torch.nn.functional import cross_entropy

from gcnzc.compress import Blocks, Sign
from gcnzc.optim import OneBitAdam, ZeroOneAdam

STEPS = 60


class Normalized(nn.Sequential):
    """A model whose first bias has no effect, so that its gradients are rounding errors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam])
@pytest.mark.parametrize("compress", [Sign(), Sign(block=None), Blocks("int4", has_feedback=True)])
def test_a_bias_before_batch_normalization_stays_small(kind, compress):
    models = [Normalized() for _ in range(2)]
    options = {"compress": compress, "total_steps": STEPS}
    optimizers = of_group(
        models,
        lambda model, group: kind(model.parameters(), 0.01, group=group, module=model, **options),
    )
    for step in range(STEPS):
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(64, 20, generator=generator)
            model.zero_grad()
            cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        step_all(optimizers)
    finalize(optimizers)
    # without the floor it is above 1,000
    assert float(models[0][0].bias.detach().abs().max()) < 2
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(1))
    model = models[0].eval()
    assert float((model(x).argmax(1) == x[:, :4].argmax(1)).float().mean()) > 0.85
