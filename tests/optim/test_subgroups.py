"""Optimizers of some of the ranks that torch.distributed was initialized for."""

import pytest
import torch
from exchange.cases import everything
from optim.local import taught, vector_of
from optim.replicas import values_of
from optim.subgroups import EVEN, ODD, STEPS, model_of, one_bit, streaming, train_in_subgroups
from processes import results

from gcnzc.exchange import Group, lockstep


def same(one, other):
    if isinstance(one, tuple):
        return one == other
    if one.dtype.is_floating_point and one.dtype.itemsize > 2:
        return torch.allclose(one, other)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_two_subgroups_of_four_processes_train_by_themselves(tmp_path):
    found = results(4, tmp_path, train_in_subgroups)
    right = lockstep([everything(rank, 2) for rank in range(2)]).results
    for members in (EVEN, ODD):
        models = [model_of(members) for _ in members]
        lockstep(
            [
                taught(model, one_bit(model, Group(rank, 2)), STEPS)
                for rank, model in enumerate(models)
            ]
        )
        expected = values_of(models[0])
        models = [model_of(members) for _ in members]
        optimizers = [streaming(model, Group(rank, 2)) for rank, model in enumerate(models)]
        pairs = zip(models, optimizers, strict=True)
        lockstep([taught(*pair, STEPS) for pair in pairs])
        lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
        for rank, member in enumerate(members):
            answers, values, message, (near, apart) = found[member]
            for each in answers:
                assert all(map(same, each, right[rank]))
            assert torch.equal(values[0], expected)
            assert torch.equal(values[1], vector_of(models[0]))
            assert "ProcessGroup" in message
            assert "subgroup" in message
            assert near[:2] == ((0, 0), (rank, 2))
            assert near[2].tolist() == [members[0]] * 3
            assert apart[:2] == ((0, 1), (0, 1))
            assert apart[2].tolist() == [member] * 3
    assert not torch.equal(found[0][1][0], found[1][1][0])


@pytest.mark.parametrize("ranks", [[1, 3], [0, 4], [-1, 0], []])
def test_a_subgroup_has_its_rank_and_none_from_outside(ranks):
    with pytest.raises(ValueError, match="rank 0 of 4 cannot be in a subgroup"):
        Group(0, 4).subgroup(ranks)


def test_a_subgroup_of_one_rank_is_alone():
    group = Group(2, 4).subgroup([2])
    assert (group.rank, group.world_size, group.backend) == (0, 1, "")
