"""Local methods average the shards of `fully_shard` with the same shards of other replicas."""

import pytest
import torch
from processes import results
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from gcnzc.compress import Sign
from gcnzc.exchange import init_group
from gcnzc.optim import CO2, DiLoCo, LocalSGD, SparseLoCo, StreamingDiLoCo

pytest.importorskip("torch.distributed.fsdp", reason="needs torch 2.6")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("needs torch 2.6", allow_module_level=True)

REPLICAS, SHARDS, SAVED, END = 2, 2, 7, 16
METHODS = {
    "local SGD": (LocalSGD, {"local_steps": 3}),
    "DiLoCo": (DiLoCo, {"local_steps": 3}),
    "DiLoCo, sharded": (DiLoCo, {"local_steps": 3, "sharded": True}),
    "Streaming DiLoCo": (StreamingDiLoCo, {"local_steps": 4, "delay": 1, "fragments": 2}),
    "CO2": (CO2, {"local_steps": 3}),
}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).double()


def rows(replica, step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + replica)).double()


def train(net, optimizer, replica, begin, end, bad_step=None):
    for step in range(begin, end):
        optimizer.zero_grad()
        net(rows(replica, step)).square().mean().backward()
        if step == bad_step:
            # in the shards of one rank only
            next(net.parameters()).grad.to_local()[0] = torch.nan
        optimizer.step()


def values(net):
    """The whole parameters."""
    return [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for each in net.parameters()
    ]


def make(net, kind, options):
    return kind(torch.optim.AdamW(net.parameters(), 0.05), **options)


def train_whole():
    """A replica on one rank, with each method."""
    found = {}
    for name, each in METHODS.items():
        with init_group() as group:
            net = model()
            optimizer = make(net, *each)
            train(net, optimizer, group.rank, 0, END)
            before = values(net)
            optimizer.finalize()
            found[name] = before, values(net)
    return found


def state_of(net, optimizer):
    return {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}


def sharded_model(mesh):
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh["shard"])
    return net


def train_sharded(folder):
    """A replica on two ranks, also saved by torch.distributed.checkpoint and resumed."""
    found = {}
    with init_group() as group:
        mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))
        replica = group.rank // SHARDS
        for name, (kind, options) in METHODS.items():
            net = sharded_model(mesh)
            optimizer = make(net, kind, options)
            assert optimizer.group.world_size == REPLICAS
            train(net, optimizer, replica, 0, SAVED)
            checkpoint.save(state_of(net, optimizer), checkpoint_id=folder / name)
            train(net, optimizer, replica, SAVED, END)
            before = values(net)
            optimizer.finalize()
            after = values(net)

            net = sharded_model(mesh)
            optimizer = make(net, kind, options)
            state = state_of(net, optimizer)
            checkpoint.load(state, checkpoint_id=folder / name)
            set_model_state_dict(net, state["model"])
            set_optimizer_state_dict(net, optimizer, state["optim"])
            train(net, optimizer, replica, SAVED, END)
            found[name] = before, after, values(net)
        skipped = []
        for bad in range(2):
            net = sharded_model(mesh)
            optimizer = make(net, DiLoCo, {"local_steps": 3})
            train(net, optimizer, replica, 0, 2, bad_step=1 if group.rank == bad else None)
            skipped.append(optimizer.skipped)
        try:
            make(sharded_model(mesh), SparseLoCo, {"compress": Sign(), "group": group})
        except ValueError as error:
            message = str(error)
    return found, skipped, message


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return (
        results(2, tmp_path_factory.mktemp("whole"), train_whole),
        results(4, tmp_path_factory.mktemp("ranks"), train_sharded, folder),
    )


@pytest.mark.parametrize("name", METHODS)
def test_two_replicas_of_two_shards_train_like_two_ranks(outcomes, name):
    whole, sharded = outcomes
    for rank, (found, _, _) in enumerate(sharded):
        for mine, its in zip(found[name], whole[rank // 2][name], strict=False):
            for one, other in zip(mine, its, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_bit_for_bit_from_a_distributed_checkpoint(outcomes, name):
    for found, _, _ in outcomes[1]:
        before, _, resumed = found[name]
        assert all(map(torch.equal, before, resumed))


def test_all_ranks_of_a_replica_skip_a_step_if_one_shard_of_a_gradient_is_not_finite(outcomes):
    # rank 0, then rank 1: both are of the first replica
    assert [skipped for _, skipped, _ in outcomes[1]] == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_a_group_with_other_shards_is_an_error(outcomes):
    for _, _, message in outcomes[1]:
        assert "shard 0 of 2" in message
        assert "shard 1 of 2" in message
