"""Block-wise quantization: codes of 8, 4 or 2 bits per element, with one scale per block."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gcnzc.compress.two_stage import Codec, Encoding
from gcnzc.kernels.codec import blocks, number_formats
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.finite import are_finite
from gcnzc.system.arguments import check_choice, check_integer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rounded(Codec):
    """A codec that rounds elements to a dtype, without scales; sums are in float32.

    `Dense` with the same dtype rounds the sum after every addition, and the sum may overflow. This
    codec rounds the elements of each rank once and their mean once, and may have error feedback.
    `gcnzc.compress.two_stage` describes the exchange.

    Raises:
        ValueError: the dtype is not one of those below.
    """

    dtype: torch.dtype = torch.bfloat16
    """float32, bfloat16 or float16"""
    has_feedback: bool = False
    """whether to use error feedback: the rounding error of each vector, and of each mean, is added
    to the next one"""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"cannot send {self.dtype}\n\nhint: use one of {', '.join(map(str, DTYPES))}"
            )

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`; only the parts of the layout are used."""
        return BlockLayout(num_elements, parts, 8, None)

    def row_bytes(self, layout: BlockLayout) -> int:
        """See `Codec`."""
        return layout.part_elements * self.dtype.itemsize

    def are_finite(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """See `Codec`."""
        return are_finite(self._view_parts(rows, layout))

    def encode(self, own: Encoding, random_counter: tuple[int, int]) -> None:
        """See `Codec`; rounding is to the nearest, so `random_counter` is not used."""
        values, error, active, layout, rows = own
        y = values.new_zeros(layout.num_parts * layout.part_elements)
        y[: len(values)] = values if error is None else values + error
        if active is not None:
            y[: len(values)].masked_fill_(~active, 0)
        self._view_parts(rows, layout).copy_(y.view(layout.num_parts, layout.part_elements))

    def update_error(self, own: Encoding) -> None:
        """See `Codec`."""
        values, error, active, layout, rows = own
        assert error is not None, "it has feedback"
        error += values
        error -= self._join_parts(rows, layout)
        if active is not None:
            error.masked_fill_(~active, 0)

    def decode_mean(self, rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        total = torch.zeros(len(out), device=out.device)
        for row in self._view_parts(rows, layout):
            total += row[: len(out)]
        out.copy_(total / len(rows))

    def decode(self, rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        out.copy_(self._join_parts(rows, layout))
        if active is not None:
            out.masked_fill_(~active, 0)

    def _view_parts(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """Return (rows, part) in this dtype: a view of the elements in the rows."""
        if not layout.part_elements:
            # an empty tensor of bytes has no view of another element size
            return rows.new_empty(len(rows), 0, dtype=self.dtype)
        return rows[:, : self.row_bytes(layout)].view(self.dtype)

    def _join_parts(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """Return (n,) in this dtype: the elements of all parts."""
        return self._view_parts(rows, layout).reshape(-1)[: layout.num_elements]


NUMBER_FORMATS = tuple(number_formats.BITS)
# dtypes in which the second stage can send the mean, in addition to the number formats
MEAN_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# the seed is the low half of a random generator's key, the number of the encoder the high half
SEED_BITS = 32


@dataclass(frozen=True)
class Blocks(Codec):
    """Codes of 8, 4 or 2 bits with one scale per block.

    `gcnzc.kernels.codec.blocks` encodes them; `gcnzc.compress.two_stage` describes the exchange.

    Raises:
        ValueError: an option is not one of those below.
    """

    number_format: str
    """number format, one of `NUMBER_FORMATS`: float8_e4m3fn, float8_e5m2, int8, int4,
    int2 or float4_e3m0; int2 converges only with error feedback"""
    block: int | None = 256
    """elements that share a scale, a multiple of 32; None for one scale per part, the slice of the
    vector of which one rank computes the mean"""
    stochastic: bool = False
    """whether to round up or down at random, so that the expected value of a code is the element;
    otherwise round to the nearest"""
    seed: int = 0
    """seed of random rounding, in [0, 2**32)"""
    has_feedback: bool = False
    """whether to use error feedback: the compression error of each vector, and of each mean, is
    added to the next one"""
    mean_format: str = "same"
    """number format of the mean in the second stage: "same" as `number_format`, "bfloat16",
    "float32" or one of `NUMBER_FORMATS`"""

    def __post_init__(self) -> None:
        check_choice("number_format", self.number_format, NUMBER_FORMATS)
        check_choice("mean_format", self.mean_format, ("same", *MEAN_DTYPES, *NUMBER_FORMATS))
        check_integer("seed", self.seed, 0, (1 << SEED_BITS) - 1)
        # the layout checks the block size
        self.block_layout(0, 1)

    @property
    def mean_codec(self) -> Codec:
        """See `Codec`."""
        if self.mean_format in MEAN_DTYPES:
            return Rounded(MEAN_DTYPES[self.mean_format], self.has_feedback)
        return (
            self
            if self.mean_format == "same"
            else replace(self, number_format=self.mean_format, mean_format="same")
        )

    @property
    def scale_elements(self) -> int | None:
        """See `Compression`."""
        return self.block

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, number_formats.BITS[self.number_format], self.block)

    def encode(self, own: Encoding, random_counter: tuple[int, int]) -> None:
        """See `Codec`."""
        key_and_step = None
        if self.stochastic:
            step, encoder = random_counter
            key_and_step = (encoder << SEED_BITS | self.seed, step)
        blocks.encode_blocks(*own, self.number_format, key_and_step)

    def update_error(self, own: Encoding) -> None:
        """See `Codec`."""
        blocks.update_error_blocks(*own, self.number_format)  # type: ignore[arg-type]

    def decode_mean(self, rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        blocks.mean_of_blocks(rows, layout, out, self.number_format)

    def decode(self, rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        blocks.decode_blocks(rows, layout, active, out, self.number_format)
