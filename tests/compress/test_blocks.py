import pytest
import torch
from compress.ways import mean_of, reducers, vectors

from gcnzc.compress import Blocks, Dense, Rounded
from gcnzc.compress.blocks import NUMBER_FORMATS
from gcnzc.kernels.codec import blocks as codec_blocks

# how far a number may be rounded to the nearest, as a share of the largest one of its block
ROOM = {
    # half a step of 32, of 448
    "float8_e4m3fn": 16 / 448,
    # half a step of 8192, of 57344
    "float8_e5m2": 4096 / 57344,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    # from the middle of 1/2 and 1
    "float4_e3m0": 0.25,
}
COUNT = 1000


def largest_of_blocks(vector, way, world_size):
    """(n,): the largest size in the block of each element."""
    cut = way.cut(len(vector), world_size)
    found = torch.zeros(len(vector), dtype=torch.float64)
    for part in range(world_size):
        begin, end = cut.bounds(part)
        for first in range(begin, end, cut.block_elements):
            here = slice(first, min(first + cut.block_elements, end))
            found[here] = vector[here].abs().max()
    return found


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("block", "world_size"), [(32, 2), (256, 3), (None, 5)])
@pytest.mark.parametrize("form", NUMBER_FORMATS)
def test_means_are_off_by_two_roundings_at_most(form, block, world_size, stochastic):
    way = Blocks(form, block, stochastic)
    given = vectors(COUNT, world_size)
    found = mean_of(reducers(way, COUNT, world_size), given)[0].double()
    # in the mean of a block, too, nothing is larger
    first = sum(largest_of_blocks(each, way, world_size) for each in given) / world_size
    room = ROOM[form] * (2 if stochastic else 1)
    wrong = (found - torch.stack(given).double().mean(dim=0)).abs()
    assert bool((wrong <= 2 * room * first * (1 + 1e-5)).all())
    # no form is so much better than it says
    assert bool((wrong > 0.2 * room * first).any())


@pytest.mark.parametrize(("second", "room"), [("float32", 1e-6), ("bfloat16", 2.0**-8)])
def test_the_second_round_may_be_better_than_the_first(second, room):
    """What it adds is of the mean's own size, since the first one alone is exact here."""
    # whole numbers up to 127, each block with the largest
    given = [torch.randint(-127, 128, (COUNT,)).float() for _ in range(3)]
    for vector in given:
        vector[::32] = 127
    found = mean_of(reducers(Blocks("int8", 32, second=second), COUNT, 3), given)[0]
    torch.testing.assert_close(found, sum(given) / 3, rtol=room, atol=1e-5)
    # thirds are no numbers of int8
    coarse = mean_of(reducers(Blocks("int8", 32), COUNT, 3), given)[0]
    assert (coarse - sum(given) / 3).abs().max() > 1.2 * (found - sum(given) / 3).abs().max()


# of a normal distribution, in blocks of 256: as measured in one go, without exchange, for design
@pytest.mark.parametrize(("form", "share"), [("int4", 0.016), ("float4_e3m0", 0.038)])
def test_of_a_normal_vector_a_known_share_is_left_out(form, share):
    # all have the same, whose codes are those of the mean too
    vector = torch.randn(40_000)
    found = mean_of(reducers(Blocks(form), 40_000, 2), [vector, vector])[0]
    left_out = (vector - found).square().sum() / vector.square().sum()
    assert left_out == pytest.approx(share, rel=0.06)


@pytest.mark.parametrize("second", ["same", "float32"])
@pytest.mark.parametrize("form", NUMBER_FORMATS)
def test_random_rounding_has_no_bias(form, second):
    # in every block the same numbers, and so many draws of each in one mean
    blocks, steps, world_size = 128, 10, 2
    given = vectors(32, world_size)
    repeated = [vector.repeat(blocks) for vector in given]
    found = {}
    for stochastic in (True, False):
        way = Blocks(form, 32, stochastic, seed=11, second=second)
        them = reducers(way, 32 * blocks, world_size)
        means = torch.stack([mean_of(them, repeated)[0] for _ in range(steps)])
        found[stochastic] = means.view(-1, 32).double().mean(dim=0)
    exact = torch.stack(given).double().mean(dim=0)
    largest = sum(float(each.abs().max()) for each in given) / world_size
    # of a draw of one of two numbers, a distance d apart, the deviation is d / 2 at most
    deviation = ROOM[form] * (largest / world_size**0.5 + (largest if second == "same" else 0))
    room = 5 * deviation / (steps * blocks) ** 0.5
    assert bool(((found[True] - exact).abs() <= room).all())
    # to the nearest, all of them are wrong in the same way
    assert (found[False] - exact).norm() > 5 * (found[True] - exact).norm()


def test_workers_and_servers_and_steps_draw_differently(monkeypatch):
    draws = []
    encode = codec_blocks.encode_blocks

    def watched(values, error, active, cut, rows, form, drawn, *args):
        draws.append(drawn)
        return encode(values, error, active, cut, rows, form, drawn, *args)

    monkeypatch.setattr(codec_blocks, "encode_blocks", watched)
    them = reducers(Blocks("int4", stochastic=True), 500, 4)
    for _ in range(3):
        mean_of(them, vectors(500, 4))
    # of each step, four workers and four servers
    assert len(draws) == len(set(draws)) == 3 * 8


def test_workers_who_have_the_same_draw_differently():
    vector = torch.full((32 * 32,), 0.35)
    vector[::32] = 7
    way = Blocks("int4", 32, stochastic=True, second="float32")
    found = mean_of(reducers(way, len(vector), 8), [vector] * 8)[0]
    # shares of eight workers, where all would have taken 0 or 1 together
    assert set((8 * found[vector < 1]).round(decimals=4).tolist()) > {0, 1, 2, 3, 4, 5, 6}
    assert found[vector < 1].mean() == pytest.approx(0.35, abs=0.02)


def test_draws_are_those_of_the_seed():
    given = vectors(COUNT, 3)

    def three_means(seed, form="int4", stochastic=True):
        them = reducers(Blocks(form, stochastic=stochastic, seed=seed), COUNT, 3)
        return torch.stack([mean_of(them, given)[0] for _ in range(3)])

    assert torch.equal(three_means(1), three_means(1))
    assert not torch.equal(three_means(1), three_means(2))
    assert not torch.equal(three_means(2**32 - 1), three_means(2))
    means = three_means(1)
    assert not torch.equal(means[0], means[1])
    # to the nearest, nothing depends on it
    assert torch.equal(three_means(1, stochastic=False), three_means(2, stochastic=False))


def test_a_mean_that_failed_draws_nothing():
    given = vectors(COUNT, 2)
    them = reducers(Blocks("int4", stochastic=True), COUNT, 2)
    mean_of(them, given)
    assert [int(each.errors()["means"]) for each in them] == [1, 1]
    spoiled = [given[0], given[1].clone().index_fill_(0, torch.tensor([7]), torch.inf)]
    with pytest.raises(AssertionError):
        mean_of(them, spoiled)
    assert [each.means for each in them] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_numbers_are_off_by_two_roundings_at_most(dtype):
    given = [vector.clamp(-100, 100) for vector in vectors(COUNT, 3)]
    found = mean_of(reducers(Rounded(dtype), COUNT, 3), given)[0].double()
    stacked = torch.stack(given).double()
    wrong = (found - stacked.mean(dim=0)).abs()
    room = torch.finfo(dtype).eps / 2 * 2.1 * stacked.abs().mean(dim=0) + 1e-7
    assert bool((wrong <= room).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_rounded_numbers_are_not_rounded(dtype):
    given = [vector.abs().clamp(max=100) for vector in vectors(COUNT, 9)]
    exact = torch.stack(given).double().mean(dim=0)
    rounded, dense = (
        (mean_of(reducers(way, COUNT, 9), given)[0] - exact).norm()
        for way in (Rounded(dtype), Dense(dtype))
    )
    assert rounded < 0.95 * dense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "int5"}, r"no form 'int5'\n\nhint: one of float8_e4m3fn, .*float4_e3m0"),
        ({"form": "int8", "second": "int5"}, r"no second form 'int5'\n\nhint: one of same, bf"),
        ({"form": "int8", "block": 100}, r"blocks of 100 elements\n\nhint: use a multiple of 32"),
        ({"form": "int8", "seed": -1}, r"no seed -1\n\nhint: from 0"),
        ({"form": "int8", "seed": 2**32}, r"no seed 4294967296\n\nhint: from 0"),
    ],
)
def test_mistaken_options_are_told(options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Blocks(**options)
