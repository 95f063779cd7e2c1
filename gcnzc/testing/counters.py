"""Counters of global memory traffic: requests, sectors and lines that warps access."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gcnzc.testing.number_types import Array

SECTOR_BYTES = 32
LINE_BYTES = 128
_SECTORS = LINE_BYTES // SECTOR_BYTES
_ADDRESS_BITS = 47


@dataclass
class AccessCounters:
    """Global memory accesses, counted for each instruction of each warp; caches are ignored.

    A request covers a run of adjacent sectors of 32 B in a line of 128 B, as in the model of PCIe
    traffic, `gcnzc.features.pcie_traffic`.
    """

    warp_instructions: int = 0  # once for each warp of which a lane executes the instruction
    lanes: int = 0
    sectors: int = 0
    # aligned blocks of 64 B; hosts with a read completion boundary of 64 B may return a completion
    # for each
    half_lines: int = 0
    lines: int = 0
    requests: Counter[int] = field(default_factory=Counter)  # by bytes

    def add(self, warps: Array, addresses: Array) -> None:
        """Count one instruction.

        Args:
            warps: (k,) the warp of each lane that executes it.
            addresses: (k,) uint64 in [0, 2**47), of at most 32 B that lie in one sector.
        """
        sector_bits = _ADDRESS_BITS - 5
        sectors = (addresses >> np.uint64(5)).astype(np.int64)
        keys = np.unique((warps.astype(np.int64) << sector_bits) + sectors)
        continues = (np.diff(keys) == 1) & (keys[1:] % _SECTORS != 0)
        begins = np.flatnonzero(np.concatenate(([True], ~continues)))
        lengths = np.diff(np.append(begins, len(keys)))
        self.warp_instructions += len(np.unique(keys >> sector_bits))
        self.lanes += len(addresses)
        self.sectors += len(keys)
        self.half_lines += len(np.unique(keys // (_SECTORS // 2)))
        self.lines += len(np.unique(keys // _SECTORS))
        for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
            self.requests[int(length) * SECTOR_BYTES] += int(count)
