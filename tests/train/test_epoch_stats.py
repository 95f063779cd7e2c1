"""The checksum of an epoch's seeds, and sums over workers."""

import torch

from gcnzc.exchange import lockstep
from gcnzc.train.epoch_stats import EpochStats, seeds_checksum, sum_stats


def splitmix64(value):
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_the_checksum_is_the_sum_of_splitmix64():
    # the generator's first number from state 0, as published
    assert seeds_checksum(torch.tensor([0])) == 0xE220A8397B1DCDAF
    ids = torch.randint(2**62, (1000,))
    assert seeds_checksum(ids) == sum(map(splitmix64, ids.tolist())) % 2**64
    assert seeds_checksum(torch.tensor([], dtype=torch.int64)) == 0


def test_the_checksum_finds_a_seed_that_is_missing_or_used_twice_in_any_order():
    seeds = torch.randperm(1000)
    whole = seeds_checksum(seeds)
    assert seeds_checksum(seeds[torch.randperm(1000)]) == whole
    assert seeds_checksum(seeds[1:]) != whole
    # as many seeds, and one of them in the place of another
    seeds[3] = seeds[4]
    assert seeds_checksum(seeds) != whole


def test_statistics_of_workers_add_up_to_those_of_all_seeds():
    seeds, logits = torch.randperm(90), torch.randn(90, 3)
    labels, loss = torch.randint(3, (90,)), torch.tensor(0.5)

    def tally_of(*parts):
        tally = EpochStats()
        for part in parts:
            tally.add(logits[part], loss, labels[part], seeds[part])
            tally.steps += 1
        return tally

    shares = [tally_of(slice(rank * 30, rank * 30 + 30)) for rank in range(3)]
    everybodys = lockstep([share.of_all_workers() for share in shares]).results
    for found in everybodys:
        assert [each.state_dict() for each in found] == [each.state_dict() for each in shares]
        whole = sum_stats(found)
        assert whole.seeds_checksum == seeds_checksum(seeds)
        assert (whole.seeds, whole.steps) == (90, 1)
        assert whole.right == tally_of(slice(0, 90)).state_dict()["right"]


def test_progress_has_no_accuracy_of_several_labels():
    stats = EpochStats()
    assert "minibatch accuracy" in stats.format_progress(True)
    assert "accuracy" not in stats.format_progress(False)
