import pytest
import torch
from compress.cases import mean_of, reducers, vectors

from gcnzc.compress import (
    NAMES,
    Blocks,
    Dense,
    RandomBlock,
    RandomK,
    Rounded,
    Sign,
    Threshold,
    TopK,
    compression,
)


def test_each_name_has_its_compression():
    found = [compression(name) for name in NAMES[:10]]
    assert found[:4] == [Dense(torch.float32), Dense(torch.float16), Dense(torch.bfloat16), Sign()]
    assert found[4:-2] == [Blocks(form) for form in NAMES[4:8]]
    # codes of so few bits need error feedback
    assert found[-2] == Blocks("int2", has_feedback=True)
    # codes that are powers of two need fewer scales
    assert found[-1] == Blocks("float4_e3m0", 1024)
    assert NAMES[4:10] == ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "int2", "float4_e3m0")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("topk", TopK),
        ("randomk", RandomK),
        ("block", RandomBlock),
        ("threshold", Threshold),
        ("sparseloco", TopK.sparse_loco),
    ],
)
def test_a_density_may_follow_the_name_of_a_sparse_compression(name, make):
    assert name in NAMES[10:]
    assert compression(name) == make()
    for text in ("0.25", ".25", "25e-2"):
        assert compression(f"{name}:{text}") == make(0.25)
    assert compression(f"{name}:1") == make(1.0)
    for text in ("", "0", "1.5", "-0.1", "nan", "1e400", "0.1:2", " 0.1", "0x1"):
        with pytest.raises(ValueError, match=rf"(?s)^no density .*{name}.*hint: .*{name}:0.01"):
            compression(f"{name}:{text}")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_computes_a_mean(name):
    given = vectors(200, 3)
    found = mean_of(reducers(compression(name), 200, 3), given)[0]
    mean = torch.stack(given).mean(dim=0)
    # compressions that send less have larger errors, but not larger than the mean
    most = {"sign": 1.3, "int2": 1.3, **dict.fromkeys(NAMES[10:], 1.01)}
    assert (found - mean).norm() < most.get(name, 0.5) * mean.norm()


def test_unknown_names_are_rejected():
    with pytest.raises(
        ValueError, match=r"(?s)no compression 'int3'\n\nhint: use one of .*int4, int2, fl"
    ):
        compression("int3")
    with pytest.raises(ValueError, match=r"(?s)int8 has no density, got 'int8:0.1'.*topk, randomk"):
        compression("int8:0.1")
    for value in (5, None):
        with pytest.raises(TypeError, match=rf"name of a compression is {value}, .*\n\nhint: "):
            compression(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sign(scale="l2"), "scale is 'l2'.*: one of rms, l1"),
        (lambda: Sign(block="a"), "blocks of 'a' elements, not a multiple of 32"),
        (lambda: Sign(block=33), "blocks of 33 elements, not a multiple of 32"),
        (lambda: Blocks("int5"), "number_format is 'int5'.*: one of float8_e4m3fn, .*float4_e3m0"),
        (lambda: Blocks("int8", mean_format="int5"), "mean_format is 'int5'.*: one of same, bf"),
        (lambda: Blocks("int8", 100), "blocks of 100 elements, not a multiple of 32"),
        (lambda: Blocks("int8", seed=-1), "seed is -1, but must be at least 0"),
        (lambda: Blocks("int8", seed=2**32), "seed is 4294967296, but must be at most"),
        (lambda: Rounded(torch.float64), "cannot send torch.float64.*: .*bfloat16"),
        *(
            (lambda dtype=dtype: Dense(dtype), f"cannot send '?{dtype}'?.*: .*bfloat16")
            for dtype in (torch.int32, torch.complex64, "float16", 5)
        ),
        (lambda: TopK(0), "density is 0"),
        (lambda: TopK(1.5), "density is 1.5"),
        (lambda: TopK(float("nan")), "density is nan"),
        (lambda: TopK("0.1"), "density is '0.1'"),
        (lambda: TopK(0.1, "row"), "per is 'row'"),
        (lambda: TopK(0.1, 0), "per is 0"),
        (lambda: TopK(0.1, True), "per is True"),
        (lambda: TopK(0.1, value_format="int4"), "value_format is 'int4'"),
        (lambda: TopK(0.1, error_decay=0), "error_decay is 0"),
        (lambda: TopK(0.1, error_decay="a"), "error_decay is 'a'"),
        (lambda: TopK(0.1, error_decay=None), "error_decay is None"),
        (lambda: RandomK(-1), "density is -1"),
        (lambda: RandomK(0.1, 2**32), "seed is 4294967296"),
        (lambda: RandomK(0.1, 1.5), "seed is 1.5"),
        (lambda: RandomBlock(0.1, -1), "seed is -1"),
        (lambda: Threshold(2), "density is 2"),
        (lambda: Threshold(0.1, 0), "refresh is 0"),
        (lambda: Threshold(0.1, 2.5), "refresh is 2.5"),
        (lambda: Threshold(0.1, per=-4), "per is -4"),
    ],
)
def test_invalid_options_are_rejected(make, message):
    with pytest.raises((TypeError, ValueError), match=f"(?s)^{message}") as error:
        make()
    assert "\n\nhint: " in str(error.value) or message.endswith("of 32")
