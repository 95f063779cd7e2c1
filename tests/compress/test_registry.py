import pytest
import torch
from compress.ways import mean_of, reducers, vectors

from gcnzc.compress import NAMES, Blocks, Dense, Rounded, Sign, compression


def test_each_word_has_its_way():
    ways = [compression(word) for word in NAMES]
    assert ways[:4] == [Dense(torch.float32), Dense(torch.float16), Dense(torch.bfloat16), Sign()]
    assert ways[4:-1] == [Blocks(form) for form in NAMES[4:-1]]
    # powers of two follow the size of each element
    assert ways[-1] == Blocks("float4_e3m0", 1024)
    assert NAMES[4:] == ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "float4_e3m0")


@pytest.mark.parametrize("word", NAMES)
def test_each_word_takes_a_mean(word):
    given = vectors(200, 3)
    found = mean_of(reducers(compression(word), 200, 3), given)[0]
    mean = torch.stack(given).mean(dim=0)
    # a way that sends less is farther off, but never by more than there is
    assert (found - mean).norm() < (1.3 if word == "sign" else 0.5) * mean.norm()


def test_a_word_that_is_none_is_told():
    with pytest.raises(ValueError, match=r"(?s)no compression 'int2'\n\nhint: one of .*int4, fl"):
        compression("int2")


def test_dtypes_that_are_not_sent_are_told():
    with pytest.raises(ValueError, match=r"(?s)torch.float64 is not sent\n\nhint: .*bfloat16"):
        Rounded(torch.float64)
