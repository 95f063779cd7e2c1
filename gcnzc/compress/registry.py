"""Compressions by name, as on the command line."""

import torch

from gcnzc.compress.blocks import NUMBER_FORMATS, Blocks
from gcnzc.compress.dense import Dense
from gcnzc.compress.reducer import Compression
from gcnzc.compress.sign import Sign

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# elements that share a scale, where it is not 256: codes that are powers of two follow the size of
# each element, and are as good with fewer scales
BLOCKS = {"float4_e3m0": 1024}


NAMES = (*DTYPES, "sign", *NUMBER_FORMATS)


def compression(word: str) -> Compression:
    """The compression that a word stands for, with its usual options.

    Args:
        word: one of `NAMES`: "float32", "float16" and "bfloat16" send all numbers in that dtype,
            "sign" one bit of each, with error feedback, and the forms of `Blocks` 8 or 4 bits.

    Raises:
        ValueError: it is none of them.
    """
    if word in DTYPES:
        return Dense(DTYPES[word])
    if word == "sign":
        return Sign()
    if word in NUMBER_FORMATS:
        return Blocks(word, BLOCKS.get(word, 256))
    raise ValueError(f"no compression {word!r}\n\nhint: one of {', '.join(NAMES)}")
