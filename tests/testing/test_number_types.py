"""Conversions of floating-point formats are exact, and round once in the direction asked for."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_numbers import from_fraction

from gcnzc.testing.number_types import (
    bits_of,
    decode,
    encode,
    float8_to_half,
    pack_argument,
    with_canonical_nan,
)


@pytest.fixture(autouse=True)
def _silent_numpy():
    # as in the executor
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_numbers_between_all_adjacent_16_bit_numbers_are_rounded_once(kind, rounding):
    infinity = 0x7C00 if kind == "f16" else 0x7F80
    lower = np.arange(infinity, dtype=np.uint16)
    values = decode(lower.view(np.float16) if kind == "f16" else lower, kind)
    # the number after the largest would be the next power of two
    upper = np.append(values[1:], 2.0**16 if kind == "f16" else 2.0**128)
    middle = (values + upper) / 2
    is_odd = lower % 2 == 1
    for sign in (0, 1):
        up = {"rz": False, "rm": sign == 1, "rp": sign == 0}.get(rounding)
        # (a number, whether to nearest it is rounded away from zero)
        for number, nearest_up in (
            (middle, is_odd),
            (np.nextafter(middle, np.inf), np.ones_like(is_odd)),
            (np.nextafter(middle, 0), np.zeros_like(is_odd)),
        ):
            away = nearest_up if up is None else np.full_like(is_odd, up)
            # infinity is next to the largest number
            expected = lower + away
            found = bits_of(encode(-number if sign else number, kind, rounding))
            assert (found == expected + (sign << 15)).all()


def test_float32_is_rounded_once_in_every_direction():
    random = np.random.default_rng(0)
    numbers = random.standard_normal(2000) * 2.0 ** random.integers(-160, 140, 2000)
    for rounding in ("rn", "rz", "rm", "rp"):
        found = bits_of(encode(numbers, "f32", rounding)).tolist()
        zero = {bits & 0x7FFFFFFF for bits in found} & {0}
        exact = [from_fraction(Fraction(x), "f32", rounding) for x in numbers.tolist()]
        same = [
            f == e or (zero and e == 0 and f == 2**31) for f, e in zip(found, exact, strict=True)
        ]
        assert all(same), rounding


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_every_8_bit_number_is_that_of_torch(kind, dtype):
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    found = torch.from_numpy(float8_to_half(kind).astype(np.float32))
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.isnan(), expected.isnan())


def test_results_have_one_nan():
    nan = np.array([0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert bits_of(with_canonical_nan(nan)).tolist() == [0x7FFFFFFF] * 2
    nan64 = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    assert bits_of(with_canonical_nan(nan64)).tolist() == [0x7FF8000000000001]


def test_arguments_are_packed_as_their_type():
    assert pack_argument("s32", -2)[:4].tolist() == [254, 255, 255, 255]
    assert pack_argument("bf16", 1.0)[:2].tolist() == [0x80, 0x3F]
    assert pack_argument("f32", 1.0)[:4].tolist() == [0, 0, 0x80, 0x3F]
