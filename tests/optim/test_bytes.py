"""Each method sends the bytes of its formula, in a fixed number of collectives."""

import pytest
import torch
from collective_sizes import lockstep_by
from optim.methods import CASES, METHODS
from optim.teams import (
    batches,
    broadcast,
    finish_pending,
    of_ranks,
    set_gradients,
    step_all,
)
from torch import nn

from gcnzc.compress import Blocks, Dense, Sign
from gcnzc.exchange import Group
from gcnzc.optim import OneBitAdam


def count_of(model):
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def steps_of(model, optimizer, end, begin=0):
    """Steps in which all elements have gradients."""
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(10 * step + optimizer.group.rank)
        for each in model.parameters():
            if each.requires_grad:
                each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
        yield from optimizer.algorithm()


def ledgers_of(name, world_size, steps, begin=0, **options):
    """The ledgers of ranks over some steps, the first optimizer, and the number of elements."""
    models, optimizers = CASES[name].team(world_size, **options)
    broadcast(optimizers)
    lockstep_by("builtin", of_ranks(steps_of, models, optimizers, begin))
    found = lockstep_by("builtin", of_ranks(steps_of, models, optimizers, steps, begin))
    finish_pending(optimizers)
    return found.ledgers, optimizers[0], count_of(models[0])


# --- in every step


@pytest.mark.parametrize("layers", [1, 9])
@pytest.mark.parametrize(
    ("options", "excluded", "requests"),
    [
        ({}, False, {"AllToAll": 1, "AllGather": 1}),
        ({}, True, {"AllToAll": 1, "AllGather": 1, "Sum": 1}),
        ({"clip_norm": 1.0}, False, {"AllToAll": 1, "AllGather": 2}),
    ],
)
def test_collectives_and_bytes_of_a_step_of_1_bit_adam(layers, options, excluded, requests):
    world_size, models, optimizers = 3, [], []
    for rank in range(world_size):
        coded = [nn.Parameter(torch.ones(shape)) for shape in [(40, 7), (7,)] * layers]
        extra = [nn.Parameter(torch.ones(11))] if excluded else []
        groups = [{"params": coded}, *({"params": [each], "compress": False} for each in extra)]
        own = OneBitAdam(groups, warmup=1, signals=2, group=Group(rank, world_size), **options)
        models.append([*coded, *extra])
        optimizers.append(own)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        for model in models:
            for parameter in model:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        ledger = step_all(optimizers).ledgers[0]
    found = {kind: entry.requests for kind, entry in ledger.entries.items()}
    # a mean may be asked for as a sum or as such
    assert {("Sum" if kind == "Mean" else kind): n for kind, n in found.items()} == requests
    # a bit of the options' hash, two signals, and how many elements would become active
    sent = Sign().bytes_sent(287 * layers, world_size, 4)
    coded = sum(ledger.entries[kind].bytes_sent for kind in ("AllToAll", "AllGather"))
    # the squared norm of a rank's gradient, float64, for each other rank
    assert coded == sent + (8 * (world_size - 1) if options else 0)
    assert all(map(torch.equal, models[0], models[1])) or not excluded


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "zero-one-adam local steps"])
def test_a_compressed_step_sends_signs_in_two_collectives(name, world_size):
    ledgers, _, count = ledgers_of(name, world_size, 4, 3)
    for ledger in ledgers:
        assert {kind: entry.requests for kind, entry in ledger.entries.items()} == {
            "AllToAll": 1,
            "AllGather": 1,
        }
        assert ledger.bytes_sent == Sign().bytes_sent(count, world_size, extras=2)


def test_local_steps_of_0_1_adam_send_nothing():
    ledgers, _, _ = ledgers_of("zero-one-adam local steps", 3, 7, 4)
    assert [ledger.bytes_sent for ledger in ledgers] == [0] * 3


@pytest.mark.parametrize("compress", [None, Dense(torch.float16)], ids=["plain", "half"])
@pytest.mark.parametrize(("name", "numbers"), [("averaged", 0), ("drop-compute", 2)])
def test_flags_and_numbers_are_sent_with_the_gradients(name, numbers, compress):
    ledgers, optimizer, count = ledgers_of(name, 4, 6, 1, signals=2, compress=compress)
    num_parameters = sum(each.requires_grad for each in optimizer.param_groups[0]["params"])
    # a flag for each parameter, the hash bit, the signals, and the counts of DropCompute
    elements = count + num_parameters + 1 + 2 + numbers
    for ledger in ledgers:
        stated = 5 * (compress or Dense()).bytes_sent(elements, 4)
        # the parts of the ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= 5 * 6 * 4
        assert ledger.requests == 5


# --- of local methods


def sent_by_exchange(name, optimizer, count, world_size):
    """The bytes that a rank sends for a mean of all elements, by formula."""
    others = world_size - 1
    layers = [each.numel() for each in optimizer.param_groups[0]["params"] if each.requires_grad]
    sent = optimizer.compress.bytes_sent(count, world_size, optimizer.extras, layers)
    is_co2 = name.startswith("co2")
    if "sharded" in name or name == "co2 at once":
        # the anchor, of CO2 with the distance
        share = -(-count // world_size)
        return sent + others * 4 * (share + -share % 32 + is_co2)
    has_gap = is_co2 and "eager" not in name and name != "co2"
    return sent + 8 * others * has_gap


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        *(("local-sgd", 1), ("local-sgd half", 1), ("local-sgd sign", 2)),
        *(("diloco", 1), ("diloco half", 1), ("diloco sign", 2)),
        # of a shard: its extras, the mean, and the anchor
        ("diloco sharded", 3),
        *(("co2 eager", 1), ("co2 eager sign", 2), ("co2 eager sharded", 3)),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_sends_the_bytes_of_its_formula(name, requests, world_size):
    ledgers, optimizer, count = ledgers_of(name, world_size, 9, signals=2)
    for ledger in ledgers:
        assert ledger.requests == 2 * requests
        stated = 2 * sent_by_exchange(name, optimizer, count, world_size)
        # parts of a ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= 2 * 2 * world_size * 4


@pytest.mark.parametrize("name", ["streaming half", "streaming sign", "streaming topk"])
def test_each_fragment_is_sent_once_in_a_window(name):
    world_size, steps = 3, 13
    ledgers, optimizer, _ = ledgers_of(name, world_size, steps)
    sizes = [each.num_elements for each in optimizer.fragments]
    num_fragments, stated, exchanges = len(sizes), 0, 0
    for number, size in enumerate(sizes):
        first = round(number * 4 / num_fragments)
        count = sum(step > first and (step - first) % 4 == 0 for step in range(1, steps + 1))
        exchanges += count
        if name != "streaming topk":
            stated += count * optimizer.compress.bytes_sent(size, world_size, optimizer.extras)
    for ledger in ledgers:
        assert ledger.requests == exchanges * (2 if "sign" in name else 1)
        if stated:
            assert abs(ledger.bytes_sent - stated) <= exchanges * 2 * world_size * 4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_selsync_sends_votes_and_means(world_size, threshold):
    ledgers, optimizer, count = ledgers_of("selsync", world_size, 10, 3, threshold=threshold)
    mean = sent_by_exchange("selsync", optimizer, count, world_size) if threshold == 0 else 0
    # a vote and a bit of 8 bytes
    stated = 7 * (2 * (world_size - 1) * 2 * 8 / world_size + mean)
    for ledger in ledgers:
        assert abs(ledger.bytes_sent - stated) <= 7 * 4 * 2 * world_size * 8


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("options", "vectors"), [({}, 2), ({"round_weight": 1}, 1)])
def test_a_round_of_fedglomo_sends_compressed_vectors(world_size, options, vectors):
    codec = Blocks("int8", stochastic=True)
    for participants in (None, 1):
        own = options if participants is None else options | {"participants": participants}
        ledgers, optimizer, count = ledgers_of("fedglomo", world_size, 8, 4, local_steps=4, **own)
        # nobody sends less than the participants do; the other entries are those of comparisons
        for ledger in ledgers:
            sent = sum(ledger.entries[kind].bytes_sent for kind in ("AllToAll", "AllGather"))
            assert sent == codec.bytes_sent(vectors * count, world_size, optimizer.extras)


# --- in pairs


@pytest.mark.parametrize("world_size", [2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saps_sends_a_share_of_the_elements_to_one_peer(world_size, dtype):
    models, optimizers = METHODS["saps"].team(world_size, dtype, density=0.1, control_interval=100)
    broadcast(optimizers)
    idle = 0
    for rows in batches(2 * world_size):
        for pair in zip(models, optimizers, strict=True):
            set_gradients(*pair, rows)
        found = step_all(optimizers)
        matched = {rank for edge in optimizers[0].pairs for rank in edge}
        idle += world_size - len(matched)
        for rank, ledger in enumerate(found.ledgers):
            stated = dtype.itemsize * round(0.1 * count_of(models[0]))
            assert ledger.bytes_sent == (stated if rank in matched else 0)
    # in turn
    assert idle == (2 * world_size if world_size % 2 else 0)
