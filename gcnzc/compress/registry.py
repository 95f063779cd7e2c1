"""Compressions by name, as the command line uses them."""

import re
from collections.abc import Callable

from gcnzc.compress.blocks import NUMBER_FORMATS, Blocks
from gcnzc.compress.dense import Dense
from gcnzc.compress.random_k import RandomBlock, RandomK
from gcnzc.compress.reducer import Compression
from gcnzc.compress.threshold import Threshold
from gcnzc.compress.top_k import TopK
from gcnzc.compress.two_stage import Sign
from gcnzc.compress.value_formats import DTYPES
from gcnzc.system.arguments import check_kind

# block sizes other than 256: codes that are powers of two have a wide range, so they are as
# accurate with fewer scales
BLOCKS = {"float4_e3m0": 1024}


# codes that are so coarse that training does not converge without error feedback
WITH_FEEDBACK = ("int2",)


# compressions that have a density after their name
SPARSE: dict[str, Callable[..., Compression]] = {
    "topk": TopK,
    "randomk": RandomK,
    "block": RandomBlock,
    "threshold": Threshold,
    "sparseloco": TopK.sparse_loco,
}


NAMES = (*DTYPES, "sign", *NUMBER_FORMATS, *SPARSE)


def compression(name: str) -> Compression:
    """Return the compression of a name, with its default options.

    Args:
        name: one of `NAMES`. "float32", "float16" and "bfloat16" send all elements in that dtype;
            "sign" sends one bit per element, with error feedback; the number formats of `Blocks`
            send 8, 4 or 2 bits per element, "int2" with error feedback. "topk", "randomk", "block",
            "threshold" and "sparseloco" send some of the elements, with error feedback: those of
            `TopK`, `RandomK`, `RandomBlock`, `Threshold` and `TopK.sparse_loco`. A colon and the
            fraction of the elements that are sent may follow their names, as in "topk:0.01".

    Raises:
        ValueError: there is no compression of that name, or the fraction is out of range.
        TypeError: `name` is not a string.
    """
    check_kind("the name of a compression", name, str, f"use one of {', '.join(NAMES)}")
    kind, colon, density = name.partition(":")
    if kind in SPARSE:
        return SPARSE[kind](_parse_density(name, density)) if colon else SPARSE[kind]()
    if name in DTYPES:
        return Dense(DTYPES[name])
    if name == "sign":
        return Sign()
    if name in NUMBER_FORMATS:
        return Blocks(name, BLOCKS.get(name, 256), has_feedback=name in WITH_FEEDBACK)
    if kind in NAMES:
        raise ValueError(
            f"the compression {kind} has no density, got {name!r}\n\nhint: omit :{density}; "
            f"a density may follow {', '.join(SPARSE)}"
        )
    raise ValueError(f"no compression {name!r}\n\nhint: use one of {', '.join(NAMES)}")


def check_compression(name: str, compress: object) -> None:
    """Check an argument of an optimizer that is a compression.

    Args:
        name: of the argument.
        compress: the argument.

    Raises:
        TypeError: it is neither a `Compression` nor None, such as a name.
    """
    hint = f"{name}=gcnzc.compress.Dense(torch.bfloat16), or another compression"
    if isinstance(compress, str):
        hint = f"{name}=gcnzc.compress.compression({compress!r})"
    if compress is not None:
        check_kind(name, compress, Compression, hint)


def _parse_density(name: str, text: str) -> float:
    """Return the density in the name of a compression."""
    if re.fullmatch(r"\d+\.?\d*(e-?\d+)?|\.\d+(e-?\d+)?", text) and 0 < float(text) <= 1:
        return float(text)
    raise ValueError(
        f"no density {text!r} in the compression {name!r}\n\nhint: give the fraction of the "
        f"elements to send, above 0 and at most 1, as in {name.partition(':')[0]}:0.01"
    )
