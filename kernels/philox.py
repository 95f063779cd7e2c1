"""Philox 4x32-10: four random 32-bit words as a function of a counter and a key.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
https://doi.org/10.1145/2063384.2063405. Triton's `tl.philox` computes the same words, and
`tl.randint4x(seed, offset)` those of the counter (offset, 0, 0, 0) and the key of `seed`.

The generator has no state: the random words of a node or element depend only on its counter and the
key, so every thread, process and device computes the same ones.
"""

import numpy as np
from numba import njit, uint64
from numpy.typing import ArrayLike, NDArray

ROUNDS = 10
# the constants of the paper: two multipliers, and the Weyl sequence of the key
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK = 0xFFFFFFFF


def split_key(seed: int) -> tuple[int, int]:
    """Return the key of a 64-bit seed: its low and its high 32 bits.

    Args:
        seed: in [-2**63, 2**64); a negative seed is taken modulo 2**64, as in Triton.

    Raises:
        ValueError: `seed` does not fit 64 bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed {seed} does not fit 64 bits\n\nhint: use a seed of 0 to 2**64 - 1")
    return seed & MASK, (seed >> 32) & MASK


def philox4x32_reference(
    c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, c3: ArrayLike, k0: ArrayLike, k1: ArrayLike
) -> tuple[NDArray[np.uint32], ...]:
    """Reference for `philox4x32`, for arrays of counters and keys.

    Args:
        c0, c1, c2, c3: words of the counters, integers in [0, 2**32) or arrays of them.
        k0, k1: words of the keys, integers in [0, 2**32) or arrays of them. All arguments are
            broadcast against each other.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    c0, c1, c2, c3, k0, k1 = (np.asarray(word, np.uint64) for word in (c0, c1, c2, c3, k0, k1))
    mask, half = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        product_0 = c0 * np.uint64(MULTIPLIER_0)
        product_1 = c2 * np.uint64(MULTIPLIER_1)
        c0, c2 = (product_1 >> half) ^ c1 ^ k0, (product_0 >> half) ^ c3 ^ k1
        c1, c3 = product_1 & mask, product_0 & mask
        k0, k1 = (k0 + np.uint64(WEYL_0)) & mask, (k1 + np.uint64(WEYL_1)) & mask
    return tuple(np.asarray(word, np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3))


# inlined by numba, since LLVM inlines too late to vectorize the caller's loop
@njit(inline="always")
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return four random words in [0, 2**32) as uint64, for compiled callers.

    Args:
        c0, c1, c2, c3: words of the counter, unsigned, below 2**32.
        k0, k1: words of the key, unsigned, below 2**32.
    """
    # uint64 throughout, since numba converts uint64 mixed with int64 to float64
    c0, c1, c2, c3 = uint64(c0), uint64(c1), uint64(c2), uint64(c3)
    k0, k1 = uint64(k0), uint64(k1)
    for _ in range(ROUNDS):
        product_0 = c0 * uint64(MULTIPLIER_0)
        product_1 = c2 * uint64(MULTIPLIER_1)
        c0 = (product_1 >> uint64(32)) ^ c1 ^ k0
        c2 = (product_0 >> uint64(32)) ^ c3 ^ k1
        c1 = product_1 & uint64(MASK)
        c3 = product_0 & uint64(MASK)
        k0 = (k0 + uint64(WEYL_0)) & uint64(MASK)
        k1 = (k1 + uint64(WEYL_1)) & uint64(MASK)
    return c0, c1, c2, c3
