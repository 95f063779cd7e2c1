"""Options of torch's `get_optimizer_state_dict`, and checkpoints of another number of ranks."""

import copy

import pytest
import torch
from optim.checkpoints import (
    OPTIONS,
    SAVED,
    load_on_other_ranks,
    train,
    trained_model,
    try_options_of_states,
)
from optim.kinds import KINDS
from processes import results
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gcnzc.exchange import Group
from gcnzc.optim import resize_state

# whose state is the same on all ranks
SHARED = "averaged"
RANKS = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, results(RANKS, folder, try_options_of_states, folder)


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_options_are_refused_by_name_unless_all_ranks_have_the_same_state(saved, name, options):
    for found in saved[1]:
        for what in ("get", "set"):
            message = found[(name, *options, what)]
            if name == SHARED or (what == "set" and "flatten_optimizer_state_dict" in options):
                # torch ignores the option there
                assert message == "works"
                continue
            option = next(iter(options))
            assert message.startswith(f"{option}=True is not supported, because each rank has its")
            assert "\n\nhint: omit the option" in message
            assert "resize_state" in message


def test_states_of_another_number_of_ranks_are_refused_with_the_rank(saved, tmp_path):
    for rank, found in enumerate(results(3, tmp_path, load_on_other_ranks, saved[0])):
        for name, message in found.items():
            if name == SHARED:
                assert message == "works"
            else:
                assert "Missing key in checkpoint state_dict" in message
                assert f".of rank {rank} of 3" in message


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_distributed_checkpoint_is_converted_for_another_number_of_ranks(
    saved, name, world_size, tmp_path
):
    folder, number = saved[0], list(KINDS).index(name)
    dcp_to_torch_save(folder / str(number), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]
    states = [
        torch.load(folder / f"{number} of {rank}", weights_only=True) for rank in range(RANKS)
    ]
    for rank in range(world_size):
        found = resize_state([whole], rank, world_size)
        if name == SHARED:
            # torch has named the parameters
            assert set(found) == {"state", "param_groups"}
            continue
        expected = resize_state(states, rank, world_size)
        # torch has named the parameters of groups
        names = found.keys() - {"param_groups"}
        assert plain({each: found[each] for each in names}) == plain(
            {each: expected[each] for each in names}
        )
        model = trained_model()
        optimizer = KINDS[name](model, Group(rank, world_size))
        optimizer.load_state_dict(copy.deepcopy(found))
        assert optimizer.steps == SAVED
        if world_size == 1:
            train(model, optimizer, SAVED, SAVED + 1)
            assert optimizer.steps == SAVED + 1
