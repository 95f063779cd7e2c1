import pytest
import torch

from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.optim import resize_state
from gcnzc.optim.resize import shard_bounds


def states(world_size, n=150, steps=3):
    """Of an optimizer with all that a state may hold."""
    torch.manual_seed(world_size)
    whole = torch.randn(n)
    made = []
    for rank in range(world_size):
        begin, end = shard_bounds(n, rank, world_size)
        made.append(
            {
                "shared": {"steps": steps, "momentum": torch.ones(n)},
                "resize": {"anchor": "mean", "count": "mean"},
                "local": {
                    "anchor": [torch.full((2,), float(rank)), rank],
                    "count": torch.tensor(4),
                },
                "shards": {"outer": whole[begin:end].clone()},
                "errors": {
                    "momentum": {"worker": torch.randn(n), "server": torch.randn(end - begin)},
                    "dense": {},
                },
                "rank": rank,
                "world_size": world_size,
            }
        )
    return made


def joined(made, name):
    return torch.cat([state["errors"]["momentum"][name] for state in made])


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 8), (3, 5), (1, 3), (5, 1)])
def test_resizing_keeps_the_sum_of_the_errors(old, new):
    before = states(old)
    after = [resize_state(before, rank, new) for rank in range(new)]
    for rank, state in enumerate(after):
        assert (state["rank"], state["world_size"]) == (rank, new)
        assert state["shared"] == before[0]["shared"]
        # each begins at the mean of those before
        assert torch.equal(state["local"]["anchor"][0], torch.full((2,), (old - 1) / 2))
        assert state["local"]["count"] == 4
        assert state["errors"]["dense"] == {}
    shards = [torch.cat([state["shards"]["outer"] for state in each]) for each in (before, after)]
    assert torch.equal(*shards)
    if new == 1:
        assert after[0]["errors"]["momentum"] == {}
        return
    workers = torch.stack([state["errors"]["momentum"]["worker"] for state in before])
    pending = joined(before, "server").double() + workers.double().mean(dim=0)
    torch.testing.assert_close(joined(after, "server").double(), pending, rtol=1e-6, atol=1e-6)
    assert not bool(joined(after, "worker").any())


def test_the_same_number_of_ranks_keeps_its_states():
    before = states(3)
    for rank in range(3):
        after = resize_state(before, rank, 3)
        assert after == before[rank]
        assert after["errors"]["momentum"]["worker"] is before[rank]["errors"]["momentum"]["worker"]


def test_resizing_does_not_change_its_arguments():
    before, same = states(4), states(4)
    resize_state(before, 1, 2)
    assert torch.equal(joined(before, "server"), joined(same, "server"))
    assert torch.equal(joined(before, "worker"), joined(same, "worker"))


def test_states_that_do_not_belong_together_are_an_error():
    with pytest.raises(ValueError, match="give the states of all ranks, in the order of ranks"):
        resize_state(states(3)[:2], 0, 2)
    with pytest.raises(ValueError, match="give the states of all ranks, in the order of ranks"):
        resize_state(states(3)[::-1], 0, 2)
    with pytest.raises(ValueError, match="states of different steps"):
        resize_state([*states(2)[:1], *states(2, steps=4)[1:]], 0, 3)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 150, 4097])
def test_shards_are_those_of_the_block_layout(n, bits):
    for world_size in (1, 2, 3, 5, 8):
        cut = BlockLayout(n, world_size, bits, 128)
        bounds = [shard_bounds(n, rank, world_size) for rank in range(world_size)]
        assert bounds == [cut.bounds(rank) for rank in range(world_size)]
        assert sum(end - begin for begin, end in bounds) == n


def test_inner_state_missing_on_one_rank_is_that_of_the_others():
    # AdamW has no state for a parameter before its first gradient
    with_first = {"state": {0: {"exp_avg": torch.tensor([2.0]), "step": torch.tensor(3.0)}}}
    with_both = {
        "state": {
            0: {"exp_avg": torch.tensor([4.0]), "step": torch.tensor(3.0)},
            1: {"exp_avg": torch.tensor([6.0]), "step": torch.tensor(1.0)},
        }
    }
    for inners in ([with_first, with_both], [with_both, with_first]):
        states = [
            {"shared": {}, "local": {"inner": inner}, "resize": {"inner": "mean"}}
            | {"shards": {}, "errors": {}, "rank": rank, "world_size": 2}
            for rank, inner in enumerate(inners)
        ]
        found = resize_state(states, 0, 1)["local"]["inner"]["state"]
        assert found[0]["exp_avg"].tolist() == [3.0]
        assert found[1]["exp_avg"].tolist() == [6.0]
