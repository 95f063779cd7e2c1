import pytest
import torch
from compress.cases import mean_of, reducers, vectors

from gcnzc.compress import Dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_dense_computes_the_mean(dtype, world_size):
    given = vectors(1000, world_size, dtype=dtype)
    found = mean_of(reducers(Dense(), 1000, world_size, dtype), given)[0]
    expected = torch.stack(given).double().mean(dim=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    if dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_short_dtype_rounds_elements_and_their_sums(dtype, digits, world_size):
    given = [vector.clamp(-100, 100) for vector in vectors(1000, world_size)]
    found = mean_of(reducers(Dense(dtype), 1000, world_size), given)[0].double()
    stacked = torch.stack(given).double()
    wrong = (found - stacked.mean(dim=0)).abs()
    # each element and each partial sum is rounded once
    room = 2.0**-digits * stacked.abs().mean(dim=0) * world_size * 1.1 + 2.0**-24
    assert bool((wrong <= room).all())
    assert wrong.max() > 2.0**-24


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_integer_extras_are_exact_up_to_the_precision_of_a_short_dtype(dtype, most):
    for world_size in (3, 7, 9):
        given = [torch.zeros(12) for _ in range(world_size)]
        given[1][10] = 1
        for rank, vector in enumerate(given):
            vector[11] = most // world_size + (rank < most % world_size)
        found = mean_of(reducers(Dense(dtype), 10, world_size), given, 2)[0]
        assert found[10:].tolist() == [1, most]
