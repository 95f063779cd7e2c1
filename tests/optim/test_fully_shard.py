"""Local methods average the shards of `fully_shard` with the same shards of other replicas."""

import pytest
import torch
from optim import fully_sharded
from processes import results

pytest.importorskip("torch.distributed.fsdp", reason="needs torch 2.6")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("needs torch 2.6", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return (
        results(2, tmp_path_factory.mktemp("whole"), fully_sharded.all_whole),
        results(4, tmp_path_factory.mktemp("ranks"), fully_sharded.sharded, folder),
    )


@pytest.mark.parametrize("name", fully_sharded.METHODS)
def test_two_replicas_of_two_shards_train_like_two_ranks(outcomes, name):
    whole, sharded = outcomes
    for rank, (found, _, _) in enumerate(sharded):
        for mine, its in zip(found[name], whole[rank // 2][name], strict=False):
            for one, other in zip(mine, its, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", fully_sharded.METHODS)
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
