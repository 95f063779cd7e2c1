"""Counters of the feature cache: hits, misses and bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock


@dataclass(frozen=True)
class CacheCounters:
    """Numbers of gathered rows and of cache hits."""

    rows: int  # gathered rows
    hits: int  # gathered rows that were cached, on the same or, in a sharded cache, on another GPU
    row_bytes: int  # bytes of one row as it is stored, and as it is read over the bus
    peer_hits: int = 0  # hits on another GPU of a sharded cache

    @property
    def hit_rate(self) -> float:
        """Hits divided by gathered rows; 0 if no row was gathered."""
        return self.hits / self.rows if self.rows else 0.0

    @property
    def own_hit_rate(self) -> float:
        """Hits on the same GPU divided by gathered rows; 0 if no row was gathered."""
        return (self.hits - self.peer_hits) / self.rows if self.rows else 0.0

    @property
    def bytes_saved(self) -> int:
        """Bytes that were not read from the host, because of hits."""
        return self.hits * self.row_bytes


class Tally:
    """Running sums of rows and hits; any thread may add to them, on any stream."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._rows = self._hits = 0
        # one sum for each stream on a GPU, since additions on different streams may overlap
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
        """Return the numbers of rows and of hits, after synchronizing with the GPUs."""
        with self._lock:
            # the sums may belong to other streams than the current one
            for device in {total.device for total in self._on_gpu.values() if total.is_cuda}:
                torch.cuda.synchronize(device)
            return self._rows, self._hits + sum(int(total) for total in self._on_gpu.values())

    def reset(self) -> None:
        """Start counting from zero."""
        with self._lock:
            self._rows = self._hits = 0
            self._on_gpu.clear()
