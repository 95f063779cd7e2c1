"""torch's GradScaler with every optimizer, over two processes, of which one overflows."""

import copy

import pytest
import torch
from optim.kinds import EVERY_STEP, KINDS, LOCAL, ZERO_ONE_LOCAL
from processes import results
from torch import nn

from gcnzc.exchange import Group, init_group
from gcnzc.optim import LocalSGD

STEPS, SCALE = 10, 1024.0
# steps: the loss of rank 1 overflows; a gradient of rank 0 does, and is clipped before `step`
OVERFLOWS, CLIPPED = 5, 7
# of the methods with local steps: steps after which all ranks have the same parameters
EXCHANGES = (4, 8)
IN_SYNC = (
    *("local-sgd", "diloco", "diloco sharded", "diloco quorum"),
    "zero-one-adam local steps",
)


def values_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def take_scaled_step(model, optimizer, scaler, rank, step, unscales=False):
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss = model(torch.randn(16, 6, generator=generator)).square().mean()
    if step == OVERFLOWS and rank == 1:
        loss = loss * torch.inf
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if unscales:
        if step == CLIPPED and rank == 0:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def train_scaled(make, group, unscales):
    """What a loop with a GradScaler sees after each step, and the parameters at the end."""
    model = make_model()
    optimizer = make(model, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    seen = []
    for step in range(1, STEPS + 1):
        take_scaled_step(model, optimizer, scaler, group.rank, step, unscales)
        seen.append((optimizer.skipped, scaler.get_scale(), values_of(model)))
    optimizer.finalize()
    return seen, values_of(model)


def train_all():
    with init_group() as group:
        found = {
            (name, unscales): train_scaled(make, group, unscales)
            for name, make in KINDS.items()
            for unscales in (False, True)
        }
        found["local-sgd of SGD"] = train_scaled(
            lambda model, group: LocalSGD(sgd(model), group, local_steps=4), group, False
        )
        return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("scaled"), train_all)


def skips_by(step, unscales):
    """How many steps are skipped until then."""
    return (step >= OVERFLOWS) + (unscales and step >= CLIPPED)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", EVERY_STEP)
def test_all_ranks_skip_the_step_and_lower_their_scales(ranks, name, unscales):
    (first, _), (second, _) = (rank[name, unscales] for rank in ranks)
    before = None
    for step, (own, other) in enumerate(zip(first, second, strict=True), 1):
        expected = skips_by(step, unscales)
        assert (own[0], other[0]) == (expected, expected), step
        # the same on both ranks, and half for each overflow
        assert own[1] == other[1] == SCALE / 2**expected, step
        assert torch.equal(own[2], other[2]), step
        is_skipped = expected > skips_by(step - 1, unscales)
        assert before is None or torch.equal(own[2], before) == is_skipped, step
        before = own[2]
    assert before.isfinite().all()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_with_local_steps_the_rank_that_overflows_skips_its_own(ranks, name, unscales):
    (first, mine), (second, theirs) = (rank[name, unscales] for rank in ranks)
    assert [(skipped, scale) for skipped, scale, _ in (first[-1], second[-1])] == [
        (int(unscales), SCALE / 2**unscales),
        (1, SCALE / 2),
    ]
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", LOCAL | ZERO_ONE_LOCAL)
def test_after_an_overflow_in_a_local_step_ranks_train_on_and_are_in_sync_again(
    ranks, name, unscales
):
    (first, mine), (second, theirs) = (rank[name, unscales] for rank in ranks)
    scales = [seen[-1][1] for seen in (first, second)]
    assert scales == [SCALE / 2**unscales, SCALE / 2]
    for step in range(OVERFLOWS + 1, STEPS + 1):
        # rank 0 overflows where gradients are unscaled
        assert unscales or not torch.equal(first[step - 1][2], first[step - 2][2]), step
        assert not torch.equal(second[step - 1][2], second[step - 2][2]), step
    for step, (own, other) in enumerate(zip(first, second, strict=True), 1):
        if name in IN_SYNC and step >= EXCHANGES[0]:
            assert torch.equal(own[2], other[2]) == (step in EXCHANGES), step
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()


def test_the_mean_after_an_overflow_is_that_of_ranks_that_trained_alone(ranks):
    """LocalSGD against torch's SGD and GradScaler, whose overflow skips a step of one rank."""
    start = make_model()
    for begin, end in [(1, EXCHANGES[0]), (EXCHANGES[0] + 1, EXCHANGES[1])]:
        models = [copy.deepcopy(start) for _ in range(2)]
        for rank, model in enumerate(models):
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
            for step in range(begin, end + 1):
                take_scaled_step(model, sgd(model), scaler, rank, step)
        mean = torch.stack([values_of(model) for model in models]).mean(dim=0)
        nn.utils.vector_to_parameters(mean, start.parameters())
        for seen, _ in (rank["local-sgd of SGD"] for rank in ranks):
            torch.testing.assert_close(seen[end - 1][2], mean)


@pytest.mark.parametrize("unscales", [False, True])
def test_one_worker_takes_the_steps_of_its_inner_optimizer(unscales):
    class Plain(torch.optim.AdamW):
        """An optimizer of torch, whose overflows GradScaler handles."""

        skipped = 0

        def finalize(self):
            """Nothing is left to do."""

    def plain(model, group):
        return Plain(model.parameters(), lr=0.01)

    expected, _ = train_scaled(plain, Group(), unscales)
    found, _ = train_scaled(EVERY_STEP["averaged"], Group(), unscales)
    for own, right in zip(found, expected, strict=True):
        assert own[1] == right[1]
        assert torch.equal(own[2], right[2])
    assert found[-1][0] == int(unscales)
