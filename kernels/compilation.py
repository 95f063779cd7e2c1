"""Report the compilation of numba and Triton kernels, which takes seconds in a first run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from numba.core import event

REPORT_S = 1.0  # total seconds of compilation before it is reported


@contextmanager
def report_compilation(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` once with a message when compilation has taken more than REPORT_S seconds.

    Kernels that are loaded from the cache on disk do not count. The times of threads that compile
    in parallel are added.
    """
    watch = _Watch(say)
    listener = _Listener(watch)
    event.register("numba:compile", listener)
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)  # since Triton 3.4
    hooks = [getattr(runtime, name, None) for name in ("jit_cache_hook", "jit_post_compile_hook")]
    if runtime is not None:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = watch.start_triton, watch.end_triton
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)
        if runtime is not None:
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


class _Watch:
    """Adds up the seconds of compilation, and reports them once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.seconds, self.is_reported = say, 0.0, False
        self.began: dict[Any, float] = {}

    def start(self, key: object) -> None:
        self.began[key] = time.perf_counter()

    def end(self, key: object) -> None:
        self.seconds += time.perf_counter() - self.began.pop(key, time.perf_counter())
        if self.seconds > REPORT_S and not self.is_reported:
            self.is_reported = True
            self.say(
                f"compiling kernels for this machine ({self.seconds:.1f} s so far); later runs "
                "load them from a cache"
            )

    def start_triton(self, *, key: Any, **_: Any) -> None:
        self.start(str(key))

    def end_triton(self, *, key: Any, **_: Any) -> None:
        self.end(str(key))


class _Listener(event.Listener):
    """Measures numba's compilation; functions compiled within a caller's are not counted twice."""

    def __init__(self, watch: _Watch) -> None:
        self.watch, self.depth = watch, 0

    def on_start(self, event: Any) -> None:
        if self.depth == 0:
            self.watch.start("numba")
        self.depth += 1

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.watch.end("numba")
