"""Philox returns the published random words, and those of Triton."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numba import njit

from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key

ONES = 0xFFFFFFFF
# the lines "philox4x32 10" of kat_vectors, which comes with Random123 1.14
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -1, -(2**63)]


@njit
def _one(c0, c1, c2, c3, k0, k1):
    return philox4x32(c0, c1, c2, c3, k0, k1)


@triton.jit
def _words(out, counters, seed, num: tl.constexpr):
    i = tl.arange(0, num)
    c0, c1 = tl.load(counters + i), tl.load(counters + num + i)
    c2, c3 = tl.load(counters + 2 * num + i), tl.load(counters + 3 * num + i)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    tl.store(out + i, w0)
    tl.store(out + num + i, w1)
    tl.store(out + 2 * num + i, w2)
    tl.store(out + 3 * num + i, w3)


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_random_words_equal_the_published_ones(counter, key, words):
    assert tuple(int(word) for word in philox4x32_reference(*counter, *key)) == words
    assert _one(*counter, *key) == words


def test_compiled_equals_reference():
    random = np.random.default_rng(0)
    inputs = random.integers(0, 2**32, (200, 6), np.uint64)
    expected = np.stack(philox4x32_reference(*inputs.T), axis=1)
    assert [list(_one(*row)) for row in inputs] == expected.tolist()


@pytest.mark.triton
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_triton(seed, device):
    random = np.random.default_rng(1)
    counters = random.integers(0, 2**32, (4, 64), np.uint32)
    out = torch.empty((4, 64), dtype=torch.int32, device=device)
    # a seed past int64 is passed as the negative number of the same bits
    signed = seed - 2**64 if seed >= 2**63 else seed
    _words[(1,)](out, torch.from_numpy(counters.view(np.int32)).to(device), signed, 64)
    expected = np.stack(philox4x32_reference(*counters, *split_key(seed)))
    assert np.array_equal(out.cpu().numpy().view(np.uint32), expected)


def test_the_key_is_the_halves_of_a_seed_of_64_bits():
    for seed in SEEDS:
        low, high = split_key(seed)
        assert low + 2**32 * high == seed % 2**64
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            split_key(seed)
