"""Options of parameter groups that differ between ranks."""

import re

import pytest
import torch
from optim.kinds import KINDS, LR
from optim.local import train
from optim.models import Everything, batches, loss_of
from optim.schedulers import train_by_own_losses
from processes import results

from gcnzc.exchange import Group, lockstep


def test_a_scheduler_that_follows_each_ranks_own_loss_ends_in_an_error_on_all_ranks(tmp_path):
    found = results(2, tmp_path, train_by_own_losses)
    assert found[0] == found[1]
    for name, (message, step) in found[0].items():
        values = re.match(
            r"lr of parameter group 0 differs between ranks: (\S+) on rank 0, (\S+) on rank 1\n\n",
            message,
        )
        assert values, (name, message)
        own, other = map(float, values.groups())
        assert own == LR, name
        assert other < LR, name
        # learning rates differ from step 3 on, and bits in about half of the exchanges
        assert 3 <= step < 40, name


@pytest.mark.parametrize("name", KINDS)
def test_options_that_differ_from_the_start_are_named_before_the_first_step(name):
    models = [Everything().float() for _ in range(2)]
    optimizers = [KINDS[name](model, Group(rank, 2)) for rank, model in enumerate(models)]
    optimizers[1].param_groups[0]["weight_decay"] = 0.5
    for model in models:
        loss_of(model, batches(1)[0]).backward()
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    message = (
        "^weight_decay of parameter group 0 differs between ranks: 0.01 on rank 0, 0.5 on rank 1"
    )
    with pytest.raises(ValueError, match=message):
        lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert all(map(torch.equal, models[0].parameters(), before))


@pytest.mark.parametrize("name", KINDS)
def test_an_option_that_one_rank_changes_during_a_run_is_named_on_all(name):
    models = [Everything().float() for _ in range(2)]
    optimizers = [KINDS[name](model, Group(rank, 2)) for rank, model in enumerate(models)]
    group = optimizers[1].param_groups[0]
    train(models, optimizers, 4)
    # an inner optimizer may have no betas
    option, value = ("betas", (0.8, 0.99)) if "betas" in group else ("lr", 0.5)
    group[option] = value
    wrong = f"{option} of parameter group 0 differs between ranks: "
    wrong += rf".* on rank 0, {re.escape(str(value))} on rank 1"
    with pytest.raises(ValueError, match=wrong):
        train(models, optimizers, 40)
