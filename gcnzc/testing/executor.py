"""Execution of a grid: threads run one program, diverge and reconverge, and wait at barriers.

Where threads diverge, those with the smallest program counter execute first, so that they
reconverge where their paths meet. Threads that have waited for long execute next, so that a thread
may wait in a loop for another one of its batch. At an instruction with `.sync`, lanes wait for the
other lanes of their warp.

Differences from a GPU: approximate instructions such as `ex2.approx` are rounded correctly; lanes
of a warp, and warps between barriers, execute in a fixed order; order between blocks by release and
acquire, and time, are not modelled.
"""

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from gcnzc.testing.counters import AccessCounters
from gcnzc.testing.decoder import Program
from gcnzc.testing.faults import Fault
from gcnzc.testing.global_memory import GlobalMemory
from gcnzc.testing.launch_state import GlobalState, LaunchState
from gcnzc.testing.number_types import Array, pack_argument
from gcnzc.testing.shared_memory import SharedMemory
from gcnzc.testing.threads import WARP_LANES, Threads

# of a batch, in which other threads execute, until threads that wait execute, too
PATIENCE = 1000


class Executor:
    """Executes launches, and adds up what they access.

    Attributes:
        counters: of accesses to global memory, by kind and argument, such as `("load", "x")`; the
            kinds are load, store and atomic.
        launches: names of the kernels.
        thread_instructions: number of instructions that threads have executed.
        seconds: total time of all launches.
    """

    def __init__(
        self,
        *,
        count: bool = True,
        detect_races: bool = True,
        allowed_races: Collection[str] = (),
        batch_threads: int = 8192,
        max_instructions: int = 10**6,
    ) -> None:
        """Create an executor.

        Args:
            count: count accesses of global memory.
            detect_races: compare accesses of warps of a block between two barriers in shared
                memory, and those of blocks in global memory.
            allowed_races: names of arguments in which blocks may race.
            batch_threads: threads that execute together, at least one block. Blocks begin in their
                order, after those of earlier batches have ended.
            max_instructions: instructions of a batch after which a launch counts as endless.
        """
        self.count, self.detect_races, self.allowed_races = count, detect_races, allowed_races
        self.batch_threads, self.max_instructions = batch_threads, max_instructions
        self.counters: dict[tuple[str, str], AccessCounters] = {}
        self.launches: list[str] = []
        self.thread_instructions = 0
        self.seconds = 0.0

    def launch(
        self,
        program: Program,
        grid: Sequence[int],
        block_threads: int,
        arguments: Sequence[tuple[str, Any]],
        memory: GlobalMemory,
        shared_bytes: int = 0,
    ) -> None:
        """Execute a grid.

        Args:
            program: the decoded PTX of the kernel, which each thread executes.
            grid: number of blocks along one to three axes.
            block_threads: threads of a block, a multiple of 32.
            arguments: (type, value) of each parameter; for a pointer, ("u64", device address).
            memory: the memory that the program may access.
            shared_bytes: dynamic shared memory of a block.

        Raises:
            ValueError: the number of arguments or threads is wrong.
            Fault: the program accesses other memory, uses an undefined value, has a race, does not
                reach a barrier in all threads, or does not end.
        """
        parameters = program.kernel.symbols.parameters
        if len(arguments) != len(parameters):
            raise ValueError(
                f"{program.name} has {len(parameters)} parameters, not {len(arguments)}\n\n"
                "hint: give one argument per parameter"
            )
        if block_threads % WARP_LANES or not 0 < block_threads <= 1024:
            raise ValueError(
                f"a block cannot have {block_threads} threads\n\n"
                "hint: use a multiple of 32 up to 1024"
            )
        values = [pack_argument(kind, value) for kind, value in arguments]
        global_state = GlobalState(
            memory, self.count, self.detect_races, self.allowed_races, self.counters
        )
        self.launches.append(program.name)
        axes, begin = [*grid, 1, 1][:3], perf_counter()
        num_blocks = int(np.prod(axes, dtype=np.int64))
        batch = max(1, self.batch_threads // block_threads)
        shared_bytes += program.kernel.static_shared_bytes
        with np.errstate(all="ignore"):
            for first in range(0, num_blocks, batch):
                blocks = np.arange(first, min(first + batch, num_blocks))
                threads = Threads(
                    program.kernel.symbols.register_dtypes, axes, blocks, block_threads
                )
                shared = SharedMemory(
                    len(blocks), shared_bytes, block_threads // WARP_LANES, self.detect_races
                )
                self._run(program, LaunchState(threads, shared, global_state, values))
        self.seconds += perf_counter() - begin

    def _run(self, program: Program, state: LaunchState) -> None:
        threads, end = state.threads, len(program.steps)
        counter = np.zeros(threads.count, np.int64)  # program counters
        barrier = np.full(threads.count, -1)  # that each thread waits at
        executed = 0
        # the value of `executed` when each thread, and when all threads that were ready, executed
        latest, latest_of_all = np.zeros(threads.count, np.int64), 0
        while True:
            threads.has_exited = counter >= end
            ready = ~threads.has_exited & (barrier < 0)
            if not ready.any():
                if (barrier >= 0).any():
                    raise _unreached_barrier(program, threads, counter, barrier)
                return
            if executed > self.max_instructions:
                raise _endless(program, threads, counter, ready, self.max_instructions)
            here = int(counter[ready].min())
            active = ready & (counter == here)
            stop = program.next_control[here]
            if active.sum() == ready.sum():
                latest_of_all = executed
            else:
                starved = None
                if executed - latest_of_all > PATIENCE:
                    waited = executed - np.maximum(latest, latest_of_all)
                    starved = ready & (waited > PATIENCE)
                here, active, stop = _next_of_divergent(program, counter, ready, starved)
                latest[active] = executed
            threads.active = None if active.all() else active
            self._execute(program, state, here, stop)
            executed += stop - here + 1
            self.thread_instructions += (stop - here) * int(active.sum())
            counter[active] = stop
            if stop < end and program.steps[stop] is None:
                self.thread_instructions += int(active.sum())
                self._control(program, state, stop, active, counter, barrier)

    def _execute(self, program: Program, state: LaunchState, begin: int, end: int) -> None:
        index = begin
        try:
            for index in range(begin, end):
                program.steps[index](state)  # type: ignore[misc]
        except Fault as fault:
            raise _located(fault, program, index) from None

    def _control(
        self,
        program: Program,
        state: LaunchState,
        index: int,
        active: Array,
        counter: Array,
        barrier: Array,
    ) -> None:
        """Execute a branch, an exit or a barrier."""
        threads, taken = state.threads, active
        if index in program.guards:
            register, is_negated = program.guards[index]
            try:
                threads.require_defined(threads.defined[register], "the predicate of a branch")
            except Fault as fault:
                raise _located(fault, program, index) from None
            taken = active & (threads.registers[register] ^ is_negated)
        counter[active & ~taken] = index + 1
        if index in program.targets:
            counter[taken] = program.targets[index]
        elif index in program.barrier_ids:
            barrier[taken] = program.barrier_ids[index]
            waiting = barrier.reshape(threads.num_blocks, -1)
            passes = (waiting[:, 0] >= 0) & (waiting == waiting[:, :1]).all(1)
            if passes.any():
                released = passes[threads.block_position]
                counter[released] += 1
                barrier[released] = -1
                state.shared.pass_barrier(np.flatnonzero(passes))
        else:
            counter[taken] = len(program.steps)


def _next_of_divergent(
    program: Program, counter: Array, ready: Array, starved: Array | None
) -> tuple[int, Array, int]:
    """Choose what executes next if the threads that are ready are at several instructions.

    Threads with the smallest program counter are executed first, so that threads reconverge after
    a branch. Lanes at an instruction with `.sync`, such as `shfl.sync`, are passed over while other
    lanes of their warp are elsewhere, even at larger program counters: the compiler may have moved
    the code from which these reach the instruction to after it.

    Args:
        program: the decoded PTX.
        counter: program counter of each thread.
        ready: the threads that may execute.
        starved: those of them that have waited for too long, which are executed first; or None.

    Returns:
        The index of the instruction, the threads that execute it, and the index to stop at.
    """
    is_sync = program.is_warp_sync
    warp_counter = np.where(ready, counter, -1).reshape(-1, WARP_LANES)
    first = np.where(ready, counter, len(is_sync)).reshape(-1, WARP_LANES).min(1)
    is_divergent = np.repeat(warp_counter.max(1) > first, WARP_LANES)
    movable = ready & ~(is_divergent & is_sync[counter])
    # lanes that cannot meet execute the instruction, which reports them
    candidates = movable if movable.any() else ready
    first_ones = candidates
    if starved is not None and (candidates & starved).any():
        first_ones = candidates & starved
    here = int(counter[first_ones].min())
    active = candidates & (counter == here)
    stop = program.next_control[here]
    others = counter[ready & ~active & (counter > here)]
    if len(others):
        stop = min(stop, int(others.min()))
    syncs = np.flatnonzero(is_sync[here + 1 : stop])
    return here, active, here + 1 + int(syncs[0]) if len(syncs) else stop


def _located(fault: Fault, program: Program, index: int) -> Fault:
    """Add the instruction to a fault."""
    instruction = program.kernel.instructions[index]
    return Fault(f"{program.name}, {instruction.source}: `{instruction.text}`\n{fault}")


def _endless(
    program: Program, threads: Threads, counter: Array, ready: Array, max_instructions: int
) -> Fault:
    index = int(counter[ready].min())
    here = threads.describe(ready & (counter == index))
    reason = f"the launch does not end within {max_instructions} instructions"
    hint = (
        "hint: a loop does not end, or waits for a block with a higher number, which begins later; "
        "Executor(max_instructions=...) permits more"
    )
    return _located(Fault(f"{reason}; this one is next {here}\n\n{hint}"), program, index)


def _unreached_barrier(program: Program, threads: Threads, counter: Array, barrier: Array) -> Fault:
    first = int((barrier >= 0).argmax())
    block, index = int(threads.block[first]), int(counter[first])
    of_block = threads.block == block
    count = int((of_block & (barrier >= 0) & (counter == index)).sum())
    return _located(
        Fault(
            f"not all threads of a block reach the same barrier: in block {block}, {count} of "
            f"{int(of_block.sum())} threads wait at it, the first is thread {threads.thread[first]}"
        ),
        program,
        index,
    )
