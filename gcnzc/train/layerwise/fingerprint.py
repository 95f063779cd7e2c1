"""Checksums of models, graphs and features, which identify the rows stored for them."""

import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.stack import Model
from gcnzc.train.label_inputs import LabelledTable

# tensors are read in chunks, which threads checksum in parallel, and of which few are in memory
CHUNK_BYTES = 1 << 24


def fingerprint_of_model(model: Model) -> str:
    """Return a checksum of a model's structure, parameters and buffers."""
    activation = getattr(model.activate, "__qualname__", repr(model.activate))
    order = model.pre_norm, model.pre_activation, model.adds_input, model.jumping
    structure = repr(model), activation, *order
    digest = hashlib.sha256(repr(structure).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {checksum(value)}".encode())
    return digest.hexdigest()


def fingerprint_of_graph(graph: Graph) -> str:
    """Return a checksum of a graph's edges; all of them are read."""
    return _of_tensors([graph.indptr, graph.indices])


def fingerprint_of_table(table: FeatureTable) -> str:
    """Return a checksum of a feature table; all rows are read."""
    if isinstance(table, LabelledTable):
        assert table.table is not None, "as constructed"
        assert table.labels is not None, "as constructed"
        labels = _of_tensors([table.labels.values, table.labels.is_input])
        digest = hashlib.sha256(f"{fingerprint_of_table(table.table)} {labels}".encode())
        return digest.hexdigest()
    parts = [table.rows]
    if table.is_sparse:
        parts = [table.rows.crow_indices(), table.rows.col_indices(), table.rows.values()]
    scales = [] if table.scales is None else [table.scales]
    digest = hashlib.sha256(_of_tensors([*parts, *scales]).encode())
    digest.update(f"{table.num_rows} {table.num_columns} {table.scale_columns}".encode())
    return digest.hexdigest()


def _of_tensors(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {checksum(tensor)}".encode())
    return digest.hexdigest()


def checksum(tensor: Tensor) -> str:
    """Return a checksum of the elements of a strided tensor on any device.

    It is a SHA-256 of CRC-32s, which are computed in parallel. It detects accidental
    changes, not deliberate collisions.
    """
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    row_bytes = rows[:1].numel() * rows.element_size()
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))

    def code_of(begin: int) -> int:
        chunk = rows[begin : begin + step].cpu().contiguous().view(-1)
        return zlib.crc32(chunk.view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        codes = list(threads.map(code_of, range(0, len(rows), step)))
    return hashlib.sha256(repr(codes).encode()).hexdigest()
