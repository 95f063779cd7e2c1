"""Draw distinct random indices from a seed and a step, the same on all ranks and devices.

The random words are those of Philox. Draw d takes two words of the counter (d // 2, d // 2 >> 32,
step, step >> 32), which select one of n elements; an element that was drawn before is drawn again.
So each set of k elements is equally likely, up to 2**-32. If k > n / 2, the elements that are left
out are drawn.

Notation: n elements, k indices.
"""

import numpy as np
import torch
from numba import njit, uint64
from torch import Tensor

from gcnzc.kernels.philox import MASK, philox4x32, philox4x32_reference, split_key

MAX_ELEMENTS = 2**31


@njit(inline="always")
def _scale(high, low, n):
    """Return a random index below n, uniform up to n / 2**64, of two 32-bit words."""
    shift = uint64(32)
    return (high * n + (low * n >> shift)) >> shift


@njit(nogil=True, cache=True)
def _mark(marked, n, count, key_0, key_1, step):
    """Set `count` distinct random elements of (n,) bool, which are all unset."""
    step_low, step_high = step & uint64(MASK), step >> uint64(32)
    size, counter, found = uint64(n), uint64(0), 0
    while found < count:
        low, high = counter & uint64(MASK), counter >> uint64(32)
        w0, w1, w2, w3 = philox4x32(low, high, step_low, step_high, key_0, key_1)
        counter += uint64(1)
        first, second = _scale(w0, w1, size), _scale(w2, w3, size)
        if not marked[first]:
            marked[first] = True
            found += 1
        if found < count and not marked[second]:
            marked[second] = True
            found += 1


def draw_indices(num_elements: int, count: int, seed: int, step: int) -> Tensor:
    """Draw distinct random indices.

    Args:
        num_elements: n, at most `MAX_ELEMENTS`.
        count: k, at most n.
        seed: of 64 bits, see `gcnzc.kernels.philox.split_key`.
        step: in [0, 2**63).

    Returns:
        The indices (k,) int64 on the CPU, in ascending order.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 <= count <= num_elements <= MAX_ELEMENTS:
        raise ValueError(f"{count} distinct indices below {num_elements}")
    keys = split_key(seed)
    marked = np.zeros(num_elements, np.bool_)
    is_inverted = 2 * count > num_elements
    wanted = num_elements - count if is_inverted else count
    _mark(marked, num_elements, wanted, *map(np.uint64, (*keys, step)))
    return torch.from_numpy(np.flatnonzero(marked != is_inverted))


def draw_index(num_elements: int, seed: int, step: int) -> int:
    """Draw one random index below `num_elements`, the first draw of `draw_indices`."""
    words = philox4x32_reference(0, 0, step & MASK, step >> 32, *split_key(seed))
    return (int(words[0]) * num_elements + (int(words[1]) * num_elements >> 32)) >> 32


def draw_indices_reference(num_elements: int, count: int, seed: int, step: int) -> list[int]:
    """Reference for `draw_indices` in Python."""
    is_inverted = 2 * count > num_elements
    wanted = num_elements - count if is_inverted else count
    chosen: set[int] = set()
    counter = 0
    while len(chosen) < wanted:
        words = philox4x32_reference(counter, 0, step & MASK, step >> 32, *split_key(seed))
        counter += 1
        for high, low in (words[:2], words[2:]):
            index = (int(high) * num_elements + (int(low) * num_elements >> 32)) >> 32
            if len(chosen) < wanted:
                chosen.add(index)
    return [index for index in range(num_elements) if (index in chosen) != is_inverted]
