"""Optimizers of some of the ranks that torch.distributed was initialized for."""

import pytest
import torch
from exchange.cases import everything, same
from optim import teams
from processes import results
from torch import distributed

from gcnzc.exchange import Group, current_group, init_group, lockstep, run
from gcnzc.optim import OneBitAdam, StreamingDiLoCo
from gcnzc.train.shared_data import first_workers, share_result

STEPS = 8
EVEN, ODD = [0, 2], [1, 3]


def model_of(members):
    """A model of float32, which differs from one subgroup to the other."""
    model = teams.Everything().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(members[0])
    return model


def one_bit(model, group):
    return OneBitAdam(model.parameters(), lr=0.01, warmup=4, group=group)


def streaming(model, group):
    options = {"local_steps": 4, "fragments": 2, "delay": 1}
    return StreamingDiLoCo(teams.adamw(model.parameters()), group, **options)


def train(make, members, group):
    model = model_of(members)
    optimizer = make(model, group)
    for rows in teams.batches(STEPS):
        teams.set_gradients(model, optimizer, rows)
        optimizer.step()
    optimizer.finalize()
    return teams.vector_of(model)


def share_in(group):
    """A group's first workers, the local places, and what its first worker shares."""
    value = share_result(lambda _: torch.full((3,), float(group.ranks[group.rank])), group)
    return first_workers(group), (group.local_rank, group.local_world_size), value


def train_in_subgroups():
    """What a process of four comes to, in the subgroup of its parity."""
    with init_group(timeout_s=60) as whole:
        members = ODD if whole.rank % 2 else EVEN
        group = whole.subgroup(members)
        answers = run(everything(group.rank, group.world_size), group)
        values = [train(one_bit, members, group)]
        # the same ranks as a process group of torch, which an optimizer does not take as it is
        made = [distributed.new_group(EVEN), distributed.new_group(ODD)]
        raw = made[whole.rank % 2]
        with pytest.raises(TypeError, match=r"ProcessGroup(?s:.*)subgroup"):
            streaming(model_of(members), raw)
        again = current_group().subgroup(distributed.get_process_group_ranks(raw))
        values.append(train(streaming, members, again))
        again.close()
        places = [share_in(group)]
        # as if the ranks were on two machines, with one member on each
        whole.local_rank, whole.local_world_size = whole.rank % 2, 2
        places.append(share_in(whole.subgroup(members)))
        return answers, values, places


def close(one, other):
    is_rounded = not isinstance(one, tuple) and one.dtype in (torch.float32, torch.float64)
    return torch.allclose(one, other) if is_rounded else same(one, other)


def test_two_subgroups_of_four_processes_train_by_themselves(tmp_path):
    found = results(4, tmp_path, train_in_subgroups)
    right = lockstep([everything(rank, 2) for rank in range(2)]).results
    for members in (EVEN, ODD):
        expected = []
        for make in (one_bit, streaming):
            models = [model_of(members) for _ in members]
            optimizers = [make(model, Group(rank, 2)) for rank, model in enumerate(models)]
            lockstep(teams.of_ranks(teams.steps_of, models, optimizers, STEPS))
            teams.finalize(optimizers)
            expected.append(teams.vector_of(models[0]))
        for rank, member in enumerate(members):
            answers, values, (near, apart) = found[member]
            assert all(map(close, answers, right[rank]))
            assert all(map(torch.equal, values, expected))
            assert near[:2] == ((0, 0), (rank, 2))
            assert near[2].tolist() == [members[0]] * 3
            assert apart[:2] == ((0, 1), (0, 1))
            assert apart[2].tolist() == [member] * 3
    assert not torch.equal(found[0][1][0], found[1][1][0])


@pytest.mark.parametrize("ranks", [[1, 3], [0, 4], [-1, 0], []])
def test_a_subgroup_has_its_rank_and_none_from_outside(ranks):
    with pytest.raises(ValueError, match="rank 0 of 4 cannot be in a subgroup"):
        Group(0, 4).subgroup(ranks)
    group = Group(2, 4).subgroup([2])
    assert (group.rank, group.world_size, group.backend) == (0, 1, "")
