"""Arithmetic of PTX against exact integers and fractions of Python."""

from fractions import Fraction

import numpy as np
import pytest
from exact_numbers import FORMATS, from_fraction, to_fraction
from ptx_kernels import bits_of, integers, signed

from gcnzc.testing import arithmetic
from gcnzc.testing.number_types import DTYPES, decode
from gcnzc.testing.number_types import bits_of as array_bits


@pytest.fixture(autouse=True)
def _numpy_wraps():
    with np.errstate(all="ignore"):
        yield


def array(values, kind):
    return np.array(values, f"u{bits_of(kind) // 8}").view(DTYPES[kind])


def floats(kind, count, seed):
    """Bits of finite numbers with exponents close to each other, so that sums need both."""
    exponent_bits, fraction_bits = FORMATS[kind]
    random, bias = np.random.default_rng(seed), (1 << (exponent_bits - 1)) - 1
    fractions = random.integers(0, 1 << fraction_bits, count)
    exponents = random.integers(bias - 8, bias + 8, count)
    # subnormal numbers among them
    exponents[::17] = 0
    signs = random.integers(0, 2, count)
    return [
        (int(s) << (exponent_bits + fraction_bits)) | (int(e) << fraction_bits) | int(f)
        for s, e, f in zip(signs, exponents, fractions, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "count"), [("f16", 3000), ("bf16", 3000), ("f32", 3000), ("f64", 300)]
)
def test_fma_rounds_once(kind, count):
    a, b, c = (floats(kind, count, seed) for seed in range(3))
    # in half of the cases the sum almost cancels
    for i in range(0, count, 2):
        product = to_fraction(a[i], kind) * to_fraction(b[i], kind)
        c[i] = from_fraction(-product, kind)
    found = arithmetic.fma(*(decode(array(x, kind), kind) for x in (a, b, c)), kind=kind)
    for x, y, z, bits in zip(a, b, c, array_bits(found).tolist(), strict=True):
        exact = to_fraction(x, kind) * to_fraction(y, kind) + to_fraction(z, kind)
        expected = from_fraction(exact, kind)
        assert bits == expected or (exact == 0 and bits << 1 & (1 << bits_of(kind)) - 1 == 0)


def test_fma_of_infinities():
    large, inf, nan = 1e200, np.inf, np.nan
    for a, b, c, expected in (
        # the exact product is finite, that in float64 is not
        (large, large, -inf, -inf), (large, -large, inf, inf), (large, large, inf, inf),
        (large, large, nan, nan), (large, large, 0.0, inf), (large, -large, 0.0, -inf),
        (inf, 1.0, -inf, nan), (inf, 0.0, 1.0, nan), (inf, -1.0, 1.0, -inf), (nan, 1.0, inf, nan),
    ):  # fmt: skip
        found = arithmetic.fma(np.array([a]), np.array([b]), np.array([c]), kind="f64")
        np.testing.assert_array_equal(found, [expected], err_msg=str((a, b, c)))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_products_quotients_and_remainders(kind):
    bits = bits_of(kind)
    x, y = integers(kind, 2000, 1), integers(kind, 2000, 2)
    mask, of = (1 << bits) - 1, (lambda v: signed(v, bits)) if kind[0] == "s" else int
    a, b = array(x, kind), array(y, kind)
    upper = array_bits(arithmetic.multiply_high(a, b)).tolist()
    quotient = array_bits(arithmetic.divide(a, b)).tolist()
    rest = array_bits(arithmetic.remainder(a, b)).tolist()
    for p, q, u, d, r in zip(x, y, upper, quotient, rest, strict=True):
        p, q = of(p), of(q)
        assert u == p * q >> bits & mask
        if q == 0:
            assert d == mask
            continue
        exact = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
        assert d == exact & mask
        assert r == p - exact * q & mask


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"])
def test_shifts_by_any_amount(kind):
    bits = bits_of(kind)
    x = integers(kind, 500)
    amounts = [*range(70), 255, 2**31, 2**32 - 1]
    for amount in amounts:
        by = np.full(len(x), amount, np.uint32)
        left = array_bits(arithmetic.shift_left(array(x, kind), by)).tolist()
        right = array_bits(arithmetic.shift_right(array(x, kind), by)).tolist()
        mask, short = (1 << bits) - 1, min(amount, 100)
        assert left == [v << short & mask for v in x]
        values = [signed(v, bits) for v in x] if kind[0] == "s" else x
        assert right == [v >> short & mask for v in values]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits, random = bits_of(kind), np.random.default_rng(3)
    x, y = integers(kind, 3000, 1), integers(kind, 3000, 2)
    begin = random.integers(0, 80, 3000).astype(np.uint32)
    length = random.integers(0, 80, 3000).astype(np.uint32)
    extracted = array_bits(arithmetic.extract_bits(array(x, kind), begin, length)).tolist()
    plain = f"b{bits}"
    inserted = arithmetic.insert_bits(array(x, plain), array(y, plain), begin, length).tolist()
    for p, q, b, n, e, i in zip(
        x, y, begin.tolist(), length.tolist(), extracted, inserted, strict=True
    ):
        # the definitions of the PTX ISA, bit by bit
        sign = p >> min(b + n - 1, bits - 1) & 1 if kind[0] == "s" and n else 0
        field = [p >> (b + k) & 1 if k < n and b + k < bits else sign for k in range(bits)]
        assert e == sum(bit << k for k, bit in enumerate(field))
        result = [q >> k & 1 for k in range(bits)]
        for k in range(min(n, bits)):
            if b + k < bits:
                result[b + k] = p >> k & 1
        assert i == sum(bit << k for k, bit in enumerate(result))


def test_permuted_bytes():
    x, y, selectors = (integers("b32", 3000, seed) for seed in range(3))
    found = arithmetic.permute_bytes(*(array(v, "b32") for v in (x, y, selectors))).tolist()
    for p, q, selector, f in zip(x, y, selectors, found, strict=True):
        both, expected = (q << 32 | p).to_bytes(8, "little"), 0
        for n in range(4):
            byte = both[selector >> 4 * n & 7]
            replicated = 255 * (byte >> 7) if selector >> 4 * n & 8 else byte
            expected |= replicated << 8 * n
        assert f == expected


def test_all_functions_of_three_bits():
    a, b, c = (np.array([value], np.uint8) for value in (0b11110000, 0b11001100, 0b10101010))
    for table in range(256):
        assert arithmetic.lookup_logic(a, b, c, table).tolist() == [table]


def test_funnel_shifts():
    x, y = integers("b32", 500, 1), integers("b32", 500, 2)
    for amount in (0, 1, 31, 32, 33, 64, 100):
        by = np.full(500, amount, np.uint32)
        for left in (True, False):
            for wraps in (True, False):
                n = amount % 32 if wraps else min(amount, 32)
                found = arithmetic.funnel_shift(array(x, "b32"), array(y, "b32"), by, left, wraps)
                both = [q << 32 | p for p, q in zip(x, y, strict=True)]
                expected = [v << n >> 32 if left else v >> n for v in both]
                assert found.tolist() == [v & 0xFFFFFFFF for v in expected]


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counts_and_reversal_of_bits(kind):
    bits, x = bits_of(kind), integers(kind, 500)
    a = array(x, kind)
    assert arithmetic.count_bits(a).tolist() == [bin(v).count("1") for v in x]
    assert arithmetic.count_leading_zeros(a).tolist() == [bits - v.bit_length() for v in x]
    assert arithmetic.reverse_bits(a).tolist() == [int(f"{v:0{bits}b}"[::-1], 2) for v in x]


def test_smaller_and_larger_of_zeros_and_nan():
    nan = np.float32(np.nan)
    a = np.array([0.0, -0.0, nan, 1.0, nan], np.float32)
    b = np.array([-0.0, 0.0, 2.0, nan, nan], np.float32)
    low, high = arithmetic.minimum(a, b, False), arithmetic.maximum(a, b, False)
    assert np.signbit(low[:2]).all()
    assert not np.signbit(high[:2]).any()
    assert low[2:4].tolist() == high[2:4].tolist() == [2.0, 1.0]
    assert array_bits(low)[4] == array_bits(high)[4] == 0x7FFFFFFF
    assert np.isnan(arithmetic.minimum(a, b, True)[2:]).all()
    assert np.isnan(arithmetic.maximum(a, b, True)[2:]).all()


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversion_to_integers_rounds_and_saturates(kind):
    dtype, bits = DTYPES[kind], bits_of(kind)
    limits, random = np.iinfo(dtype), np.random.default_rng(0)
    values = random.standard_normal(500) * 2.0 ** random.integers(-4, bits + 3, 500)
    values[:8] = [0.5, 1.5, -0.5, -1.5, 2.5, float(limits.max), float(limits.min), 1e30]
    modes = {"rn": round, "rz": int, "rm": lambda v: v // 1, "rp": lambda v: -(-v // 1)}
    for mode, function in modes.items():
        numpy_function = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[mode]
        found = arithmetic.to_integer(values, dtype, "f32", numpy_function).tolist()
        exact = [int(function(Fraction(value))) for value in values.tolist()]
        assert found == [min(max(v, limits.min), limits.max) for v in exact]
    nan = np.array([np.nan])
    of_single = int(arithmetic.to_integer(nan, dtype, "f32", np.rint)[0])
    of_double = int(arithmetic.to_integer(nan, dtype, "f64", np.rint)[0])
    special = limits.min if kind[0] == "s" else 1 << (bits - 1)
    assert of_double == special
    assert of_single == (special if bits == 64 else 0)
