"""Compressions by name, as the command line uses them."""

import torch

from gcnzc.compress.blocks import NUMBER_FORMATS, Blocks
from gcnzc.compress.dense import Dense
from gcnzc.compress.reducer import Compression
from gcnzc.compress.sign import Sign

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# block sizes other than 256: codes that are powers of two have a wide range, so they are as
# accurate with fewer scales
BLOCKS = {"float4_e3m0": 1024}


# codes that are so coarse that training does not converge without error feedback
WITH_FEEDBACK = ("int2",)


NAMES = (*DTYPES, "sign", *NUMBER_FORMATS)


def compression(name: str) -> Compression:
    """Return the compression of a name, with its default options.

    Args:
        name: one of `NAMES`. "float32", "float16" and "bfloat16" send all elements in that dtype;
            "sign" sends one bit per element, with error feedback; the number formats of `Blocks`
            send 8, 4 or 2 bits per element, "int2" with error feedback.

    Raises:
        ValueError: there is no compression of that name.
    """
    if name in DTYPES:
        return Dense(DTYPES[name])
    if name == "sign":
        return Sign()
    if name in NUMBER_FORMATS:
        return Blocks(name, BLOCKS.get(name, 256), has_feedback=name in WITH_FEEDBACK)
    raise ValueError(f"no compression {name!r}\n\nhint: use one of {', '.join(NAMES)}")
