"""Counters of the feature cache: hits, misses and bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock


@dataclass(frozen=True)
class CacheCounters:
    """What a cached table was asked for."""

    rows: int
    hits: int  # of them, which the GPU has, or another that splits the set with it
    row_bytes: int  # of one row as it is stored, hence as it crosses the bus
    peer_hits: int = 0  # of the hits, those that another has

    @property
    def hit_rate(self) -> float:
        """Hits for each row; 0 if none was asked for."""
        return self.hits / self.rows if self.rows else 0.0

    @property
    def own_hit_rate(self) -> float:
        """Hits that the GPU itself has, for each row; 0 if none was asked for."""
        return (self.hits - self.peer_hits) / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """That did not cross the bus from the host, or would not have."""
        return self.hits * self.row_bytes


class Tally:
    """Rows and hits so far; any thread adds to them, on any stream."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._rows = self._hits = 0
        # on a GPU, so that nobody waits: one sum a stream, as streams do not add in turns
        self._on_gpu: dict[tuple[torch.device, int], Tensor] = {}

    def add(self, rows: int, hits: int | Tensor) -> None:
        """Count rows read, and how many of them were in the cache (a number, or a GPU scalar)."""
        with self._lock:
            self._rows += rows
            if isinstance(hits, int):
                self._hits += hits
                return
            stream = torch.cuda.current_stream(hits.device).cuda_stream if hits.is_cuda else 0
            total = self._on_gpu.get((hits.device, stream))
            if total is None:
                self._on_gpu[hits.device, stream] = hits
            else:
                total += hits

    def read(self) -> tuple[int, int]:
        """Return the numbers of rows and of hits. Waits for the GPU."""
        with self._lock:
            # sums are of streams that need not be the present one
            for device in {total.device for total in self._on_gpu.values() if total.is_cuda}:
                torch.cuda.synchronize(device)
            return self._rows, self._hits + sum(int(total) for total in self._on_gpu.values())

    def reset(self) -> None:
        """Start counting from zero."""
        with self._lock:
            self._rows = self._hits = 0
            self._on_gpu.clear()
