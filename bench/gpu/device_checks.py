"""Checks of a GPU that `bench/gpu/session.py` runs, each in a process of its own.

    python -m bench.gpu.device_checks identify                 the GPU and its driver, as JSON
    python -m bench.gpu.device_checks compile --out FILE       compile gathers; record resources
    python -m bench.gpu.device_checks driver --out FILE        rules of the driver, as JSON
    python -m bench.gpu.device_checks gathers                  gather rows, and compare the results

`identify` has exit status 2 without a CUDA device.
"""

import argparse
import json
import mmap
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench import harness
from gcnzc.features.pinning import pinned
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import Layout
from gcnzc.system.cuda_driver import Driver

COLUMNS = (100, 602, 1433)
DEVICE = torch.device("cuda")
# attributes of cuDeviceGetAttribute, by cuda.h
ATTRIBUTES = {
    "multiprocessors": 16,
    "can_map_host_memory": 19,
    "copy_engines": 40,
    "unified_addressing": 41,
    "pageable_memory_access": 88,
    "host_pointer_for_registered_memory": 91,
    "host_register_supported": 99,
    "pageable_memory_by_host_page_tables": 100,
    "read_only_host_register_supported": 113,
}


def identify(options: argparse.Namespace) -> None:
    """Print the machine, the GPU's compute capability, and its UUID, as JSON."""
    if not torch.cuda.is_available():
        sys.exit(2)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {
        "arch": 10 * properties.major + properties.minor,
        "uuid": str(getattr(properties, "uuid", "")),
    }
    print(json.dumps(harness.machine() | about))


class _Target:
    """The part of a Triton driver that compilation uses, for a GPU that is not installed."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device
        return self.arch

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_kernels(options: argparse.Namespace) -> None:
    """Compile the gathers of `COLUMNS` as their launches do, without a launch.

    Triton's cache has the same keys on a machine without a GPU as on one with it, if the versions
    of Triton are equal. The registers, spills and shared memory of each kernel, or the error of its
    compilation, are written to the file `out`, one JSON line each.

    Raises:
        RuntimeError: a gather was not compiled; the others were.
    """
    launch, compiled, failed = JITFunction.run, [], []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        compiled.append(launch(kernel, *args, grid=grid, warmup=True, **how))
        return compiled[-1]

    JITFunction.run = compile_only
    for arch in options.arch or [None]:
        if arch is not None:
            triton.runtime.driver.set_active(_Target(arch))
        for name, rows, ids, layout in _gathers(num_rows=8, num_ids=4):
            device_ids = ids.to(DEVICE)
            # a pointer to pageable memory is valid here: nothing is launched
            out = torch.empty(len(ids), rows.shape[1], dtype=rows.dtype, device=DEVICE)
            line = {"launch": name}
            try:
                # ids are checked in the check `gathers`, and not in training
                for checked in (True, False):
                    gather_rows(rows, device_ids, out, layout=layout, checked=checked)
                line |= _resources(compiled[-1])
            # the last two: of cuobjdump
            except (
                *(RuntimeError, triton.TritonError),
                *(OSError, subprocess.SubprocessError),
            ) as error:
                line["outcome"] = _message(error)
                failed.append(name)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    JITFunction.run = launch
    if failed:
        raise RuntimeError(f"not compiled: {', '.join(failed)}")


def _resources(kernel: Any) -> dict[str, Any]:
    """Return the resources of a compiled kernel, as cuobjdump reports them for its machine code."""
    tool = Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", report)}
    return {
        "kernel": kernel.metadata.name,
        "arch": kernel.metadata.target.arch,
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": kernel.metadata.shared,
        "triton": triton.__version__,
    }


def gather_wide_rows(options: argparse.Namespace) -> None:
    """Gather rows of `COLUMNS` columns from page-locked memory, and compare them with torch's.

    Raises:
        RuntimeError: a gather raised an exception, or its rows differ; the others ran.
    """
    num_rows, num_ids = (50, 9) if options.small else (20_000, 5000)
    failed = []
    for name, rows, ids, layout in _gathers(num_rows, num_ids):
        outcome = _outcome(partial(_is_gathered, rows, ids, layout), "passed", "wrong rows")
        print(name, outcome, flush=True)
        failed += [name] if outcome != "passed" else []
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _is_gathered(rows: Tensor, ids: Tensor, layout: Layout) -> bool:
    with pinned(rows) as table:
        found = gather_rows(table.rows, ids.to(DEVICE), layout=layout, checked=True).cpu()
    return torch.equal(found, rows[ids])


def _gathers(num_rows: int, num_ids: int) -> Iterator[tuple[str, Tensor, Tensor, Layout]]:
    """Yield names, rows, ids and layouts of contiguous rows, rows at an offset, and padded rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_rows, (num_ids,), generator=generator)
    ids[:2] = torch.tensor([num_rows - 1, 0])
    for columns in COLUMNS:
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
            whole = torch.randn(num_rows, columns + 1, generator=generator).to(dtype)
            contiguous = _on_line(num_rows, columns, dtype).copy_(whole[:, :columns])
            yield f"gather {columns} {name}, shifted", contiguous, ids, "shifted"
        yield f"gather {columns} {name} at an offset, shifted", whole[:, 1:], ids, "shifted"
        padded = _on_line(num_rows, -(-columns // 64) * 64, dtype)[:, :columns]
        yield (
            f"gather {columns} {name} padded, pitched",
            padded.copy_(whole[:, :-1]),
            ids,
            "pitched",
        )


def _on_line(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return a table of zeros that begins on a line of 128 B."""
    memory = torch.zeros(num_rows * num_columns + 128 // dtype.itemsize, dtype=dtype)
    begin = -memory.data_ptr() % 128 // dtype.itemsize
    return memory[begin : begin + num_rows * num_columns].view(num_rows, num_columns)


def probe_driver(options: argparse.Namespace) -> None:
    """Read the driver's attributes, and find out how it treats registrations of host memory."""
    driver, number = Driver(), torch.cuda.current_device()
    found = harness.machine()
    found["attributes"] = {
        name: driver.attribute(attribute, number) for name, attribute in ATTRIBUTES.items()
    }
    found["rules"] = registration_rules(driver)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def registration_rules(driver: Any) -> dict[str, Any]:
    """Record how a driver treats registrations: error codes, reported ranges, and copies."""
    page = mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 16 * page), dtype=torch.uint8)
    memory.copy_(torch.arange(len(memory)) % 251)
    base = memory.data_ptr()

    def copy(begin: int, end: int) -> str:
        return _outcome(lambda: torch.equal(memory[begin:end].to("cuda").cpu(), memory[begin:end]))

    def copy_back(begin: int, end: int) -> str:
        expected, part = memory.clone(), memory[begin:end]
        return _outcome(lambda: torch.equal(part.copy_(part.to("cuda")), expected[begin:end]))

    # both begin and end within a page, and they are adjacent within one
    first, second = (64, 3 * page + 160), (3 * page + 160, 6 * page + 32)
    rules: dict[str, Any] = {"page_bytes": page}
    # if so, `pinned` would not register it
    rules["unregistered memory is reported"] = driver.locked_range(base) is not None
    rules["register a range"] = driver.lock(base + first[0], first[1] - first[0])
    rules["exact range is reported"] = driver.locked_range(base + 64) == (
        base + 64,
        base + first[1],
    )
    rules["register an adjacent range on the same page"] = driver.lock(
        base + second[0], second[1] - second[0]
    )
    rules["device addresses equal host addresses"] = all(
        driver.device_address(base + offset) == base + offset
        for offset in (first[0], first[1] - 1, second[0], second[1] - 1)
    )
    rules["register an overlapping range"] = driver.lock(base + page, page)
    rules["unregister an address inside a range"] = driver.unlock(base + page)
    rules["unregister an address that is not registered"] = driver.unlock(base + 10 * page)
    rules["copy a part of a range"] = copy(first[0] + 100, first[1] - 100)
    rules["copy a range"] = copy(*first)
    rules["copy to a range"] = copy_back(*first)
    rules["copy two adjacent ranges at once"] = copy(first[0], second[1])
    rules["copy memory before a range, on its page"] = copy(0, first[0])
    rules["copy memory after a range, on its page"] = copy(second[1], 8 * page)
    rules["copy memory from before a range into it"] = copy(0, page)
    rules["copy memory from a range beyond it"] = copy(page * 5, 9 * page)
    rules["unregister the first range"] = driver.unlock(base + first[0])
    rules["second range is still mapped on the shared page"] = (
        driver.device_address(base + second[0]) is not None
    )
    rules["copy the second range after that"] = copy(*second)
    rules["unregister the second range"] = driver.unlock(base + second[0])
    rules |= _read_only_rules(driver, page)
    rules["copy unregistered memory"] = copy(0, len(memory))
    return rules


def _read_only_rules(driver: Any, page: int) -> dict[str, Any]:
    """Record how a driver treats a file that is mapped read-only."""
    found = {}
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4 * page))
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        for flag in (False, True):
            code = driver.lock(mapped.ctypes.data, 2 * page, flag)
            found[f"register a read-only file {'with' if flag else 'without'} the flag"] = code
            if code == 0:
                driver.unlock(mapped.ctypes.data)
    return found


def _outcome(
    compare: Callable[[], bool], right: str = "correct", wrong: str = "wrong bytes"
) -> str:
    try:
        return right if compare() else wrong
    except (RuntimeError, triton.TritonError) as error:
        return _message(error)


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "identify": identify,
    "compile": compile_kernels,
    "driver": probe_driver,
    "gathers": gather_wide_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the check of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--small", action="store_true", help="few rows")
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="compile for this architecture; default: the GPU's",
    )
    options = parser.parse_args(arguments)
    CHECKS[options.check](options)


if __name__ == "__main__":
    main()
