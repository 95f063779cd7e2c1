import pytest
import torch
from compress.cases import mean_of, reducers, vectors

from gcnzc.compress import NAMES, Blocks, Dense, Rounded, Sign, compression


def test_each_name_has_its_compression():
    found = [compression(name) for name in NAMES]
    assert found[:4] == [Dense(torch.float32), Dense(torch.float16), Dense(torch.bfloat16), Sign()]
    assert found[4:-2] == [Blocks(form) for form in NAMES[4:-2]]
    # codes of so few bits need error feedback
    assert found[-2] == Blocks("int2", has_feedback=True)
    # codes that are powers of two need fewer scales
    assert found[-1] == Blocks("float4_e3m0", 1024)
    assert NAMES[4:] == ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "int2", "float4_e3m0")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_computes_a_mean(name):
    given = vectors(200, 3)
    found = mean_of(reducers(compression(name), 200, 3), given)[0]
    mean = torch.stack(given).mean(dim=0)
    # compressions that send less have larger errors, but not larger than the mean
    assert (found - mean).norm() < (1.3 if name in ("sign", "int2") else 0.5) * mean.norm()


def test_unknown_names_are_rejected():
    with pytest.raises(
        ValueError, match=r"(?s)no compression 'int3'\n\nhint: use one of .*int4, int2, fl"
    ):
        compression("int3")


def test_dtypes_that_cannot_be_sent_are_rejected():
    with pytest.raises(ValueError, match=r"(?s)cannot send torch.float64\n\nhint: .*bfloat16"):
        Rounded(torch.float64)
