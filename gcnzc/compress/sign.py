"""One-bit compression: the signs of elements, with one scale per block."""

from dataclasses import dataclass
from typing import Literal

from gcnzc.compress.two_stage import Codec, Encoding
from gcnzc.kernels.codec import signs
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.system.arguments import check_choice


@dataclass(frozen=True)
class Sign(Codec):
    """Signs with one scale per block and error feedback, as in 1-bit Adam (Tang et al., 2021).

    A zero counts as positive. Each rank computes the mean of one part of the vector.
    `gcnzc.compress.two_stage` describes the exchange. `gcnzc.kernels.codec.block_layout` describes
    the rows: the encoded parts of a vector.

    Raises:
        ValueError: an option is not one of those below.
    """

    block: int | None = 4096
    """number of elements that share a scale, a multiple of 32; None for one scale per part"""
    scale: Literal["rms", "l1"] = "rms"
    """a block's scale: "rms", the root mean square of its elements, or "l1", their mean absolute
    value"""
    has_feedback: bool = True
    """whether to use error feedback: the compression error of a vector is added to the next vector,
    and that of a mean to the next mean"""

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("rms", "l1"))
        # the layout checks the block size
        self.block_layout(0, 1)

    @property
    def scale_elements(self) -> int | None:
        """See `Compression`."""
        return self.block

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, 1, self.block)

    def encode(self, own: Encoding, random_counter: tuple[int, int]) -> None:
        """See `Codec`; signs are deterministic, so `random_counter` is not used."""
        signs.encode_signs(*own, self.scale)

    def update_error(self, own: Encoding) -> None:
        """See `Codec`."""
        signs.update_error_signs(*own)  # type: ignore[arg-type]

    # the arguments of the kernels are those of `Codec`
    decode_mean = staticmethod(signs.mean_of_signs)
    decode = staticmethod(signs.decode_signs)
