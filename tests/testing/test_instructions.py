"""Every arithmetic instruction form, executed in small kernels, against exact arithmetic."""

import operator
from fractions import Fraction

import numpy as np
import pytest
from exact_numbers import FORMATS, float_bits, from_fraction, is_finite, is_nan, to_fraction
from ptx_kernels import apply, bits_of, integers, signed
from slow_cases import mark_slow

COUNT = 256


def as_integer(bits, kind):
    return signed(bits, bits_of(kind)) if kind[0] == "s" else bits


def check_integers(instruction, kinds, result, expected, values=None):
    """Execute an instruction on random integers, and compare with a function of integers."""
    values = values or [integers(kind, COUNT, seed) for seed, kind in enumerate(kinds)]
    found = apply(instruction, kinds, values, result)
    mask = 1 if result == "pred" else (1 << bits_of(result)) - 1
    for bits, *operands in zip(found, *values, strict=True):
        numbers = [as_integer(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        assert bits == int(expected(*numbers)) & mask, (instruction, numbers)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_sums_and_logic(bits):
    for sign in "us":
        kind = f"{sign}{bits}"
        functions = {"add": operator.add, "sub": operator.sub, "min": min, "max": max}
        functions |= {"mul.lo": operator.mul, "mul.hi": lambda a, b: a * b >> bits}
        for name, function in functions.items():
            check_integers(f"{name}.{kind} %y, %x0, %x1", [kind] * 2, kind, function)
        check_integers(
            f"mad.lo.{kind} %y, %x0, %x1, %x2", [kind] * 3, kind, lambda a, b, c: a * b + c
        )
        if bits < 64:
            wide = f"{sign}{2 * bits}"
            check_integers(f"mul.wide.{kind} %y, %x0, %x1", [kind] * 2, wide, lambda a, b: a * b)
            check_integers(
                f"mad.wide.{kind} %y, %x0, %x1, %x2",
                [kind, kind, wide],
                wide,
                lambda a, b, c: a * b + c,
            )
    kind = f"b{bits}"
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        check_integers(f"{name}.{kind} %y, %x0, %x1", [kind] * 2, kind, function)
    check_integers(f"not.{kind} %y, %x0", [kind], kind, lambda a: ~a)
    check_integers(f"mov.{kind} %y, %x0", [kind], kind, lambda a: a)
    check_integers(f"neg.s{bits} %y, %x0", [f"s{bits}"], f"s{bits}", lambda a: -a)
    check_integers(f"abs.s{bits} %y, %x0", [f"s{bits}"], f"s{bits}", abs)
    check_integers(
        f"selp.{kind} %y, %x0, %x1, %x2",
        [kind, kind, "pred"],
        kind,
        lambda a, b, p: a if p else b,
        [integers(kind, 64, 1), integers(kind, 64, 2), [0, 1] * 32],
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_quotients(kind):
    values = [integers(kind, COUNT, 1), [v or 3 for v in integers(kind, COUNT, 2)]]

    def divide(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    check_integers(f"div.{kind} %y, %x0, %x1", [kind] * 2, kind, divide, values)
    check_integers(
        f"rem.{kind} %y, %x0, %x1", [kind] * 2, kind, lambda a, b: a - b * divide(a, b), values
    )
    by_zero = [values[0], [0] * COUNT]
    check_integers(f"div.{kind} %y, %x0, %x1", [kind] * 2, kind, lambda a, b: -1, by_zero)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits):
    amounts = ([*range(80), 255, 2**31, 2**32 - 1] * COUNT)[:COUNT]
    for kind, name, function in (
        (f"b{bits}", "shl", lambda a, n: a << min(n, 100)),
        (f"u{bits}", "shr", lambda a, n: a >> n),
        (f"s{bits}", "shr", lambda a, n: a >> n),
    ):
        values = [integers(kind, COUNT), amounts]
        check_integers(f"{name}.{kind} %y, %x0, %x1", [kind, "u32"], kind, function, values)
        check_integers(f"{name}.{kind} %y, %x0, 3", [kind], kind, lambda a, f=function: f(a, 3))


def test_instructions_on_words():
    word = ["b32"] * 3

    def permute(a, b, selector):
        both, found = (b << 32 | a).to_bytes(8, "little"), 0
        for n in range(4):
            byte = both[selector >> 4 * n & 7]
            found |= (255 * (byte >> 7) if selector >> 4 * n & 8 else byte) << 8 * n
        return found

    check_integers("prmt.b32 %y, %x0, %x1, %x2", word, "b32", permute)
    check_integers("prmt.b32 %y, %x0, %x1, 0x7632U", word[:2], "b32",
                   lambda a, b: permute(a, b, 0x7632))  # fmt: skip
    check_integers("lop3.b32 %y, %x0, %x1, %x2, 0xe8", word, "b32",
                   lambda a, b, c: (a & b) | (a & c) | (b & c))  # fmt: skip
    for k in range(8):
        check_integers(f"lop3.b32 %y, %x0, %x1, %x2, {1 << k}", word, "b32",
                       lambda *bits, k=k: (bits[0] if k & 4 else ~bits[0])
                       & (bits[1] if k & 2 else ~bits[1])
                       & (bits[2] if k & 1 else ~bits[2]))  # fmt: skip
    for mode, amount in (("clamp", min), ("wrap", lambda n, _: n % 32)):
        values = [*(integers("b32", COUNT, seed) for seed in (1, 2)),
                  [v % 70 for v in integers("u32", COUNT, 3)]]  # fmt: skip
        check_integers(f"shf.l.{mode}.b32 %y, %x0, %x1, %x2", ["b32", "b32", "u32"], "b32",
                       lambda a, b, n, f=amount: (b << 32 | a) << f(n, 32) >> 32,
                       values)  # fmt: skip
        check_integers(f"shf.r.{mode}.b32 %y, %x0, %x1, %x2", ["b32", "b32", "u32"], "b32",
                       lambda a, b, n, f=amount: (b << 32 | a) >> f(n, 32), values)  # fmt: skip
    for bits in (32, 64):
        kind = f"b{bits}"
        check_integers(f"popc.{kind} %y, %x0", [kind], "u32", lambda a: bin(a).count("1"))
        check_integers(f"clz.{kind} %y, %x0", [kind], "u32", lambda a, n=bits: n - a.bit_length())
        check_integers(f"brev.{kind} %y, %x0", [kind], kind,
                       lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))  # fmt: skip


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = bits_of(kind)
    places = [[v % 80 for v in integers("u32", COUNT, seed)] for seed in (3, 4)]

    def extract(a, begin, length):
        # the definition of the PTX ISA, bit by bit
        sign = a >> min(begin + length - 1, bits - 1) & 1 if kind[0] == "s" and length else 0
        is_in = (k < length and begin + k < bits for k in range(bits))
        return sum((a >> (begin + k) & 1 if own else sign) << k for k, own in enumerate(is_in))

    def insert(a, b, begin, length):
        mask = ((1 << length) - 1) << begin
        return b & ~mask | a << begin & mask

    operands = [integers(kind, COUNT, seed) for seed in (1, 2)]
    check_integers(f"bfe.{kind} %y, %x0, %x1, %x2", [kind, "u32", "u32"], kind, extract,
                   [operands[0], *places])  # fmt: skip
    plain = f"b{bits}"
    check_integers(f"bfi.{plain} %y, %x0, %x1, %x2, %x3", [plain, plain, "u32", "u32"], plain,
                   insert, [*operands, *places])  # fmt: skip


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_comparisons_of_integers(kind):
    functions = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
    values = [[v % 5 for v in integers(kind, 64, 1)], integers(kind, 64, 2)]
    for name, function in functions.items():
        check_integers(f"setp.{name}.{kind} %y, %x0, %x1", [kind] * 2, "pred", function, values)
    if kind[0] == "u":
        for name, like in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            check_integers(
                f"setp.{name}.{kind} %y, %x0, %x1", [kind] * 2, "pred", functions[like], values
            )
    check_integers(
        f"setp.lt.and.{kind} %y, %x0, %x1, %x2",
        [kind, kind, "pred"],
        "pred",
        lambda a, b, p: a < b and p,
        [*values, [0, 1] * 32],
    )


def test_both_results_of_a_comparison():
    body = ".reg .pred %other; setp.eq.or.b32 %other|%y, %x0, %x1, %x2"
    # the second predicate joins the opposite comparison
    values = [[1, 1, 2, 2], [1, 1, 1, 1], [0, 1, 0, 1]]
    assert apply(body, ["b32", "b32", "pred"], values, "pred") == [0, 1, 1, 1]


def test_logic_of_predicates():
    values = [[0, 0, 1, 1], [0, 1, 0, 1]]
    for name, expected in (("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])):
        assert apply(f"{name}.pred %y, %x0, %x1", ["pred"] * 2, values, "pred") == expected
    assert apply("not.pred %y, %x0", ["pred"], [[0, 1]], "pred") == [1, 0]
    assert apply("mov.pred %y, %x0", ["pred"], [[0, 1]], "pred") == [0, 1]
    assert apply("mov.pred %y, 1", ["pred"], [[0, 1]], "pred") == [1, 1]
    assert apply("and.pred %y, !%x0, %x1", ["pred"] * 2, values, "pred") == [0, 1, 0, 0]


def numbers(kind, count, seed):
    """Bits of finite numbers of moderate size, with some zeros and subnormals."""
    exponent_bits, fraction_bits = FORMATS[kind]
    bias, random = (1 << (exponent_bits - 1)) - 1, np.random.default_rng(seed)
    exponents = random.integers(bias - 6, bias + 6, count)
    exponents[::9] = 0
    fractions, signs = random.integers(0, 1 << fraction_bits, count), random.integers(0, 2, count)
    bits = [
        int(s) << (exponent_bits + fraction_bits) | int(e) << fraction_bits | int(f)
        for s, e, f in zip(signs, exponents, fractions, strict=True)
    ]
    return [0, 1 << (exponent_bits + fraction_bits), *bits[2:]]


def check_floats(instruction, kind, count, exact, values=None):
    check_float_kinds(instruction, [kind] * count, kind, exact, values)


def check_float_kinds(instruction, kinds, result, exact, values=None):
    """Execute an instruction on random numbers, and compare with a function of fractions."""
    values = values or [numbers(kind, COUNT, seed) for seed, kind in enumerate(kinds)]
    found = apply(instruction, kinds, values, result)
    sign = 1 << (bits_of(result) - 1)
    for bits, *operands in zip(found, *values, strict=True):
        fractions = [to_fraction(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        expected = exact(*fractions)
        if expected is None:
            continue
        rounded = from_fraction(expected, result)
        # the sign of a zero is looked at elsewhere
        assert bits == rounded or (expected == 0 and bits in (0, sign)), (instruction, fractions)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_floating_point_is_rounded_once(kind):
    rounding = ".rn" if kind in ("f32", "f64") else ""
    check_floats(f"add{rounding}.{kind} %y, %x0, %x1", kind, 2, lambda a, b: a + b)
    check_floats(f"sub.{kind} %y, %x0, %x1", kind, 2, lambda a, b: a - b)
    check_floats(f"mul.{kind} %y, %x0, %x1", kind, 2, lambda a, b: a * b)
    a, b = (numbers(kind, COUNT, seed) for seed in (0, 1))
    products = zip(*([to_fraction(x, kind) for x in values] for values in (a, b)), strict=True)
    # also sums that almost cancel
    for values in (None, [a, b, [from_fraction(-x * y, kind) for x, y in products]]):
        text = f"fma.rn.{kind} %y, %x0, %x1, %x2"
        check_floats(text, kind, 3, lambda a, b, c: a * b + c, values)
    check_floats(f"min.{kind} %y, %x0, %x1", kind, 2, min)
    check_floats(f"max.NaN.{kind} %y, %x0, %x1", kind, 2, max)
    check_floats(f"abs.{kind} %y, %x0", kind, 1, abs)
    check_floats(f"neg.{kind} %y, %x0", kind, 1, lambda a: -a)
    if kind in ("f32", "f64"):
        check_floats(f"div.rn.{kind} %y, %x0, %x1", kind, 2, lambda a, b: a / b if b else None)
        check_floats(f"rcp.rn.{kind} %y, %x0", kind, 1, lambda a: 1 / a if a else None)
    if kind == "f32":
        check_floats("div.full.f32 %y, %x0, %x1", kind, 2, lambda a, b: a / b if b else None)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mixed_precision_is_rounded_once_to_f32(kind):
    for rounding in ("", ".rn"):
        for name, exact in (("add", lambda a, c: a + c), ("sub", lambda a, c: a - c)):
            text = f"{name}{rounding}.f32.{kind} %y, %x0, %x1"
            check_float_kinds(text, [kind, "f32"], "f32", exact)
    text = f"fma.rn.f32.{kind} %y, %x0, %x1, %x2"
    check_float_kinds(text, [kind, kind, "f32"], "f32", lambda a, b, c: a * b + c)


def test_fma_of_infinities():
    large, inf, nan = 1e200, np.inf, np.nan
    cases = (
        # the exact product is finite, that in float64 is not
        (large, large, -inf, -inf), (large, -large, inf, inf), (large, large, inf, inf),
        (large, large, nan, nan), (large, large, 0.0, inf), (large, -large, 0.0, -inf),
        (inf, 1.0, -inf, nan), (inf, 0.0, 1.0, nan), (inf, -1.0, 1.0, -inf), (nan, 1.0, inf, nan),
    )  # fmt: skip
    *values, expected = ([float_bits(v, "f64") for v in each] for each in zip(*cases, strict=True))
    found = apply("fma.rn.f64 %y, %x0, %x1, %x2", ["f64"] * 3, values, "f64")
    np.testing.assert_array_equal(*(np.array(v, "u8").view("f8") for v in (found, expected)))


def test_smaller_and_larger_of_zeros_and_nan():
    one, two, minus, nan = 0x3F800000, 0x40000000, 1 << 31, 0x7FC00000
    values, only = [[0, minus, nan, one, nan], [minus, 0, two, nan, nan]], 0x7FFFFFFF
    for name, zeros in (("min", [minus] * 2), ("max", [0] * 2)):
        found = apply(f"{name}.f32 %y, %x0, %x1", ["f32"] * 2, values, "f32")
        assert found == [*zeros, two, one, only]
        found = apply(f"{name}.NaN.f32 %y, %x0, %x1", ["f32"] * 2, values, "f32")
        assert found == [*zeros, only, only, only]


def test_subnormal_numbers_are_flushed():
    tiny, one = float_bits(1e-39, "f32"), float_bits(1.0, "f32")
    assert apply("mul.ftz.f32 %y, %x0, %x1", ["f32"] * 2, [[tiny], [one]], "f32") == [0]
    assert apply("mul.f32 %y, %x0, %x1", ["f32"] * 2, [[tiny], [one]], "f32") == [tiny]
    least = float_bits(2.0**-126, "f32")
    half = float_bits(0.5, "f32")
    assert apply("mul.rn.ftz.f32 %y, %x0, %x1", ["f32"] * 2, [[least], [half]], "f32") == [0]


def test_approximations_are_accurate():
    x = [float_bits(v, "f32") for v in (0.25, 1.0, 2.0, 3.5)]
    values = np.array([0.25, 1.0, 2.0, 3.5])
    for name, function in (
        ("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("sin.approx", np.sin),
        ("cos.approx", np.cos), ("tanh.approx", np.tanh), ("sqrt.approx", np.sqrt),
        ("sqrt.rn", np.sqrt), ("rsqrt.approx", lambda v: 1 / np.sqrt(v)),
        ("rcp.approx", lambda v: 1 / v), ("ex2.approx.ftz", np.exp2),
    ):  # fmt: skip
        found = apply(f"{name}.f32 %y, %x0", ["f32"], [x], "f32")
        assert found == function(values).astype(np.float32).view(np.uint32).tolist(), name


def test_comparisons_with_nan():
    nan, one = 0x7FC00000, float_bits(1.0, "f32")
    values = [[nan, one, one], [one, nan, one]]
    for name, expected in (
        ("lt", [0, 0, 0]), ("ltu", [1, 1, 0]), ("eq", [0, 0, 1]), ("equ", [1, 1, 1]),
        ("ne", [0, 0, 0]), ("neu", [1, 1, 0]), ("num", [0, 0, 1]), ("nan", [1, 1, 0]),
        ("geu", [1, 1, 1]),
    ):  # fmt: skip
        assert apply(f"setp.{name}.f32 %y, %x0, %x1", ["f32"] * 2, values, "pred") == expected
    halves = [[0x7FC0, 0x3F80, 0x3F80], [0x3F80, 0x7FC0, 0x3F80]]
    assert apply("setp.ltu.bf16 %y, %x0, %x1", ["bf16"] * 2, halves, "pred") == [1, 1, 0]


# -- conversions


def all_halves():
    return list(range(2**16))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_16_bit_number_converts_to_float32_and_back(kind):
    wide = apply(f"cvt.f32.{kind} %y, %x0", [kind], [all_halves()], "f32")
    for bits, found in enumerate(wide):
        if is_nan(bits, kind):
            assert found == 0x7FFFFFFF
        elif is_finite(bits, kind):
            assert to_fraction(found, "f32") == to_fraction(bits, kind)
            assert found >> 31 == bits >> 15
        else:
            assert found & 0x7FFFFFFF == 0x7F800000
    back = apply(f"cvt.rn.{kind}.f32 %y, %x0", ["f32"], [wide], kind)
    assert back == [0x7FFF if is_nan(bits, kind) else bits for bits in all_halves()]


@pytest.mark.parametrize(
    "kind",
    # the narrowest and the widest
    mark_slow(
        ((kind,) for kind in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")),
        lambda kind: kind not in ("s8", "u64"),
    ),
)
def test_every_float16_converts_to_integers(kind):
    bits = bits_of(kind)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    found = apply(f"cvt.rni.{kind}.f16 %y, %x0", ["f16"], [all_halves()], f"b{max(bits, 16)}")
    for code, integer in enumerate(found):
        if not is_finite(code, "f16"):
            continue
        exact = min(max(round(to_fraction(code, "f16")), low), high)
        # a register that is wider than the type is extended by the sign
        assert integer == exact & (1 << max(bits, 16)) - 1


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversion_to_integers_rounds_and_saturates(kind):
    bits, random = bits_of(kind), np.random.default_rng(0)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    values = random.standard_normal(COUNT) * 2.0 ** random.integers(-4, bits + 3, COUNT)
    values[:8] = [0.5, 1.5, -0.5, -1.5, 2.5, high, low, 1e30]
    modes = {"rni": round, "rzi": int, "rmi": lambda v: v // 1, "rpi": lambda v: -(-v // 1)}
    mask, special = (1 << max(bits, 16)) - 1, low if kind[0] == "s" else 1 << bits - 1
    for source, of_nan in (("f32", special if bits == 64 else 0), ("f64", special)):
        exact = values.astype(np.float32 if source == "f32" else np.float64).tolist()
        given = [float_bits(v, source) for v in [*exact, np.nan]]
        for mode, function in modes.items():
            text = f"cvt.{mode}.{kind}.{source} %y, %x0"
            found = apply(text, [source], [given], f"b{max(bits, 16)}")
            wanted = [min(max(int(function(Fraction(v))), low), high) for v in exact]
            assert found == [v & mask for v in [*wanted, of_nan]], text


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_integers_convert_to_floating_point(kind):
    for source in ("u16", "s16", "u32", "s32", "u64", "s64"):
        if source[1:] == "64" and kind == "bf16":
            continue
        values = integers(source, COUNT)
        found = apply(f"cvt.rn.{kind}.{source} %y, %x0", [source], [values], kind)
        for bits, value in zip(found, values, strict=True):
            assert bits == from_fraction(Fraction(as_integer(value, source)), kind)


def test_integers_saturate_as_floating_point():
    for kind in ("f16", "f32", "f64"):
        one = float_bits(1.0, kind)
        for source in ("u16", "s16", "u32", "s32", "u64", "s64"):
            minus = (1 << bits_of(source)) - 5
            values = [[0, 1, 5, minus]]
            found = apply(f"cvt.rn.sat.{kind}.{source} %y, %x0", [source], values, kind)
            assert found == [0, one, one, 0 if source[0] == "s" else one]


def test_integers_convert_to_integers():
    kinds = [f"{sign}{bits}" for bits in (16, 32, 64) for sign in "us"]
    for source in kinds:
        for result in kinds:
            check_integers(f"cvt.{result}.{source} %y, %x0", [source], result, lambda a: a)
            bits = bits_of(result)
            low = -(1 << bits - 1) if result[0] == "s" else 0
            high = (1 << bits - (result[0] == "s")) - 1
            check_integers(
                f"cvt.sat.{result}.{source} %y, %x0",
                [source],
                result,
                lambda a, low=low, high=high: min(max(a, low), high),
            )


def test_conversions_between_floating_point_types():
    for source in ("f16", "bf16", "f32", "f64"):
        for result in ("f16", "bf16", "f32", "f64"):
            if source != result:
                rounding = ".rn" if bits_of(result) <= bits_of(source) else ""
                text = f"cvt{rounding}.{result}.{source} %y, %x0"
                check_float_kinds(text, [source], result, lambda a: a)
    check_floats("cvt.rzi.f32.f32 %y, %x0", "f32", 1, lambda a: Fraction(int(a)))
    check_floats("cvt.rmi.f64.f64 %y, %x0", "f64", 1, lambda a: Fraction(a // 1))
    check_floats("cvt.sat.f32.f32 %y, %x0", "f32", 1, lambda a: min(max(a, 0), Fraction(1)))


def test_packing_and_unpacking_of_registers():
    values = [[0x1234], [0x5678]]
    assert apply("mov.b32 %y, {%x0, %x1}", ["b16"] * 2, values, "b32") == [0x56781234]
    body = ".reg .b16 %other; mov.b32 {%other, %y}, %x0"
    assert apply(body, ["b32"], [[0x56781234]], "b16") == [0x5678]
    body = ".reg .b32 %low, %high; mov.b64 {%low, %high}, %x0; mov.b64 %y, {%high, %low}"
    assert apply(body, ["b64"], [[0x1122334455667788]], "b64") == [0x5566778811223344]
