"""Compilation and launch of Triton kernels without a GPU: their PTX is executed on a CPU.

This is the only module that uses private interfaces of Triton. It is for the versions in
`SUPPORTED_VERSIONS`.
"""

import contextlib
import io
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gcnzc.testing.decoder import Program, load_program
from gcnzc.testing.executor import Executor
from gcnzc.testing.global_memory import GlobalMemory
from gcnzc.testing.threads import WARP_LANES

SUPPORTED_VERSIONS = ((3, 6), (3, 7))
# that they compile for
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
# types of Triton's signatures that have other names in PTX
_TYPES = {"i1": "u8", "u1": "u8", "fp16": "f16", "fp32": "f32", "fp64": "f64"}
# pointers to scratch memory, which Triton's launcher adds
_MAX_SCRATCH_POINTERS = 2
_FIRST_DEVICE = 1 << 20  # above the index of any GPU
_UNASSEMBLED = "ptx"  # folder of the cache for kernels without machine code

# what is called instead of a launch: with the function, the compiled kernel, its grid as it was
# given, and its arguments by name
OnLaunch = Callable[[JITFunction, Any, Any, dict[str, Any]], None]


class _Driver:
    """The part of a Triton driver that compilation uses."""

    def __init__(self, arch: int, assemble: bool) -> None:
        self.target = GPUTarget("cuda", arch, WARP_LANES)
        # Triton keeps compiled kernels per device: these must not serve a GPU or another target
        self.device = _FIRST_DEVICE + 2 * arch + assemble

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what `triton.autotune` measures with; all configurations take the same time."""
        return lambda _launch, quantiles: [0.0] * len(quantiles)


@contextlib.contextmanager
def execute_on_cpu(
    arch: int = 90,
    *,
    executor: Executor | None = None,
    assemble: bool = False,
    reachable: Callable[[], Iterable[Tensor]] = tuple,
    edit: Callable[[str], str] = str,
) -> Iterator[Executor]:
    """Compile the Triton kernels that are launched in this context, and execute their PTX.

    A launch may access its tensor arguments, which are on the host, and nothing else. The PTX is
    that which a GPU would execute: it is specialized by the arguments of the launch.

    Args:
        arch: compute capability, such as 90 for sm_90.
        executor: executes the launches; a new one if None.
        assemble: also translate the PTX to machine code, which detects errors that only ptxas does.
        reachable: returns tensors that kernels access by addresses stored in their arguments.
        edit: changes the PTX before it is executed.

    Yields:
        The executor, with its counters.

    Raises:
        ValueError: Triton does not compile for the architecture.
        RuntimeError: this version of Triton is not supported, or its interpreter is in use.
        UnsupportedInstruction: the executor does not implement an instruction of a kernel.
        NotImplementedError: a kernel has clusters of blocks, scratch memory, or arguments of other
            types than numbers, tensors and tuples of them.
        Fault: see `Executor.launch`.
    """
    executor = executor or Executor()

    def execute(_function: JITFunction, kernel: Any, grid: Any, arguments: dict[str, Any]) -> None:
        shape = grid(dict(arguments)) if callable(grid) else grid
        _check_supported(kernel)
        program = _load(edit(kernel.asm["ptx"]))
        _launch(executor, kernel, program, shape, arguments, reachable())

    with compile_launches(arch, execute, assemble=assemble):
        yield executor


@contextlib.contextmanager
def compile_launches(arch: int, on_launch: OnLaunch, *, assemble: bool = False) -> Iterator[None]:
    """Compile the Triton kernels that are launched in this context, and call `on_launch` instead.

    Args:
        arch: compute capability, such as 90 for sm_90.
        on_launch: called for each launch, see `OnLaunch`.
        assemble: also translate the PTX to machine code.

    Raises:
        ValueError: Triton does not compile for the architecture.
        RuntimeError: this version of Triton is not supported, its interpreter is in use, or its
            cache cannot be created.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"arch={arch!r} is not an architecture that Triton compiles for\n\n"
            f"hint: use one of {', '.join(map(str, ARCHITECTURES))}, such as 90 for sm_90"
        )
    _check_triton()
    outer_run, interpret = JITFunction.run, os.environ.pop("TRITON_INTERPRET", None)
    compile_only = _original(outer_run)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
        if not warmup:
            named = {name: value for name, value in options.items() if name in self.arg_names}
            bound = self.signature.bind(*args, **named)
            bound.apply_defaults()
            on_launch(self, kernel, grid, bound.arguments)
        return kernel

    def make_no_cubin(*_args: Any) -> bytes:
        return b""

    backend = triton.backends.backends["nvidia"].compiler
    active, outer_make_cubin = driver._active, backend.make_cubin
    # contexts may be nested
    replaced: list[tuple[Any, Any]] = [(run, compile_only)]
    replaced.append((make_no_cubin, _original(outer_make_cubin)))
    for function, original in replaced:
        function.original = original
    driver.set_active(_Driver(arch, assemble))
    JITFunction.run = run
    backend.make_cubin = _original(outer_make_cubin) if assemble else make_no_cubin
    try:
        with triton.knobs.cache.scope():
            # a GPU must not load kernels without machine code from the cache on disk
            triton.knobs.cache.dir = str(_cache_folder(assemble))
            yield
    finally:
        JITFunction.run, backend.make_cubin = outer_run, outer_make_cubin
        driver.set_active(active)
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def _cache_folder(assemble: bool) -> Path:
    """Return the folder of Triton's cache for these kernels, which exists."""
    # of TRITON_CACHE_DIR, which may be empty
    folder = Path(triton.knobs.cache.dir or Path.home() / ".triton" / "cache")
    folder = folder.parent if folder.name == _UNASSEMBLED else folder
    folder = folder if assemble else folder / _UNASSEMBLED
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"Triton's cache {folder} cannot be created: {error.strerror}\n\n"
            "hint: TRITON_CACHE_DIR names a folder in which you may write"
        ) from None
    return folder


def assemble(kernel: Any) -> tuple[bytes, str]:
    """Translate the PTX of a kernel to machine code, with the options that Triton uses.

    Args:
        kernel: a kernel that `compile_launches` passes to `on_launch`.

    Returns:
        The machine code as an ELF file, and the report of ptxas.
    """
    target, report = kernel.metadata.target, io.StringIO()
    compiler = triton.backends.backends["nvidia"].compiler
    make_cubin = _original(compiler.make_cubin)
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(report):
        triton.knobs.nvidia.dump_ptxas_log = True
        cubin = make_cubin(compiler(target), kernel.asm["ptx"], {}, kernel.metadata, target.arch)
    return cubin, report.getvalue()


def disassemble(code: bytes, arch: int) -> str:
    """Return instructions as text with their encoding, by the disassembler of Triton's wheel.

    Args:
        code: instructions of 16 B each.
        arch: compute capability, such as 90 for sm_90.
    """
    target = f"SM{arch}{'a' if arch >= 90 else ''}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-hex", "--binary", target, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _original(function: Any) -> Any:
    """Return the function that `compile_launches` has replaced by `function`, or `function`."""
    return getattr(function, "original", function)


def _check_triton() -> None:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in SUPPORTED_VERSIONS:
        names = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        raise RuntimeError(
            f"PTX is not executed with Triton {triton.__version__}\n\nhint: install Triton {names}"
        )
    if not isinstance(triton.language.cdiv, JITFunction):
        raise RuntimeError(
            "Triton was imported with TRITON_INTERPRET=1, so its kernels are interpreted\n\n"
            "hint: unset TRITON_INTERPRET in this process"
        )


@lru_cache(256)
def _load(ptx: str) -> Program:
    return load_program(ptx)


def _launch(
    executor: Executor,
    kernel: Any,
    program: Program,
    grid: Any,
    arguments: dict[str, Any],
    reachable: Iterable[Tensor],
) -> None:
    memory, values = GlobalMemory(), []
    for tensor in reachable:
        memory.map_at_host_address("reachable", *_extent(tensor), keep=tensor)
    for name, kind, value in _flat_arguments(kernel.src.signature, arguments):
        if kind == "constexpr":
            continue
        if not kind.startswith("*"):
            values.append((_TYPES.get(kind, kind.replace("i", "s", 1)), value))
            continue
        if isinstance(value, Tensor):
            value = memory.map(name, *_extent(value), keep=value)
        values.append(("u64", 0 if value is None else value))
    scratch = len(program.kernel.symbols.parameters) - len(values)
    if not 0 <= scratch <= _MAX_SCRATCH_POINTERS:
        raise NotImplementedError(
            f"{program.name} has {len(program.kernel.symbols.parameters)} parameters, but "
            f"{len(values)} arguments\n\nhint: pass numbers, tensors and tuples of them"
        )
    values += [("u64", 0)] * scratch
    threads = WARP_LANES * kernel.metadata.num_warps
    executor.launch(program, grid, threads, values, memory, kernel.metadata.shared)


def _check_supported(kernel: Any) -> None:
    """Raise a NotImplementedError if a kernel has what the executor does not provide.

    Blocks of a cluster wait for each other, but blocks are executed one after another. Scratch
    memory is allocated by Triton's launcher, which is not used.
    """
    if kernel.metadata.num_ctas != 1 or getattr(kernel.metadata, "global_scratch_size", 0):
        raise NotImplementedError(
            f"{kernel.name} has clusters of blocks or scratch memory, which are not executed\n\n"
            "hint: launch it with num_ctas=1"
        )


def _flat_arguments(
    signature: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Yield name, type and value of each parameter; of a tuple, of each element."""
    for name, kind in signature.items():
        value = arguments[name]
        if isinstance(kind, tuple):
            names = [f"{name}[{number}]" for number in range(len(kind))]
            yield from _flat_arguments(
                dict(zip(names, kind, strict=True)), dict(zip(names, value, strict=True))
            )
        else:
            yield name, kind, value


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the bytes up to its last one."""
    if tensor.device != torch.device("cpu"):
        raise ValueError(
            f"a kernel that executes on the CPU cannot access a tensor on {tensor.device}\n\n"
            "hint: move the tensor to the host"
        )
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
