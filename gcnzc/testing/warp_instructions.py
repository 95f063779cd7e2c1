"""Instructions across the lanes of a warp: shuffles, votes, reductions, and the active mask."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gcnzc.testing.arithmetic import maximum, minimum
from gcnzc.testing.faults import Fault, unsupported
from gcnzc.testing.launch_state import LaunchState, Step
from gcnzc.testing.number_types import Array
from gcnzc.testing.operands import Operands, Read, Value
from gcnzc.testing.program import Instruction
from gcnzc.testing.threads import WARP_LANES, Threads

NAMES = ("shfl", "vote", "redux", "activemask")
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "min": np.minimum, "max": np.maximum,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_BITWISE = ("and", "or", "xor")
_LANE_BITS = np.uint64(1) << np.arange(WARP_LANES, dtype=np.uint64)


def decode_warp_instruction(instruction: Instruction, operands: Operands) -> Step:
    """Return what an instruction across lanes does.

    Raises:
        UnsupportedInstruction: this form is not implemented.
    """
    opcode = instruction.opcode
    if instruction.name == "activemask" and opcode == ("activemask", "b32"):
        write = operands.writer(instruction.operands[0], "b32")
        return lambda state: write(
            state.threads, ballot(state.threads, state.threads.active_mask()), None
        )
    if "sync" not in opcode:
        raise unsupported(instruction.text, "without .sync")
    if instruction.name == "shfl" and opcode[-1] == "b32" and len(instruction.operands) == 5:
        return _shuffle(instruction, operands)
    if instruction.name == "vote" and len(instruction.operands) == 3:
        return _vote(instruction, operands)
    if instruction.name == "redux" and opcode[2] in _REDUCTIONS:
        return _reduction(instruction, operands)
    raise unsupported(instruction.text)


def ballot(threads: Threads, votes: Array) -> Array:
    """Return (n,) the votes of the active lanes of each thread's warp, lane 0 in the lowest bit."""
    return _bits_of_warps(votes if threads.active is None else votes & threads.active)


def _bits_of_warps(values: Array) -> Array:
    """Return (n,) uint32, the values of the 32 lanes of each thread's warp, of (n,) bool."""
    bits = (values.reshape(-1, WARP_LANES) * _LANE_BITS).sum(1, np.uint64)
    return np.repeat(bits.astype(np.uint32), WARP_LANES)


def _members(state: LaunchState, member_mask: Read) -> Array:
    """Return (n,) uint32, the lanes that take part in the instruction with each active thread.

    These are the active lanes of its warp with the same member mask.

    Raises:
        Fault: an active lane is not in its mask, or a lane of the mask is not active, has another
            mask, and has not exited.
    """
    threads = state.threads
    mask, defined = member_mask(threads)
    threads.require_defined(defined, "a member mask")
    masks, active = np.broadcast_to(mask, (threads.count,)), threads.active_mask()
    members = _lanes_with_equal_masks(masks, active)
    wanted = masks
    if threads.has_exited.any():
        wanted = masks & ~_bits_of_warps(threads.has_exited)
    wrong = active & (wanted != members)
    if wrong.any():
        first = int(wrong.argmax())
        raise Fault(
            f"the member mask {int(masks[first]):#010x} differs from the lanes that execute the "
            f"instruction, {int(members[first]):#010x}, {threads.describe(wrong)}"
        )
    return members


def _lanes_with_equal_masks(masks: Array, active: Array) -> Array:
    """Return (n,) uint32, for each active thread the active lanes of its warp with its mask."""
    members = _bits_of_warps(active)
    by_warp, active_by_warp = masks.reshape(-1, WARP_LANES), active.reshape(-1, WARP_LANES)
    first = by_warp[np.arange(len(by_warp)), active_by_warp.argmax(1)]
    for warp in np.flatnonzero((active_by_warp & (by_warp != first[:, None])).any(1)):
        for mask in np.unique(by_warp[warp][active_by_warp[warp]]):
            lanes = np.flatnonzero(active_by_warp[warp] & (by_warp[warp] == mask))
            members[warp * WARP_LANES + lanes] = _LANE_BITS[lanes].sum()
    return members


def _shuffle(instruction: Instruction, operands: Operands) -> Step:
    mode = instruction.opcode[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise unsupported(instruction.text)
    destinations = instruction.operands[0].split("|")
    write, read = (
        operands.writer(destinations[0], "b32"),
        operands.reader(instruction.operands[1], "b32"),
    )
    write_valid = operands.writer(destinations[1], "pred") if len(destinations) > 1 else None
    read_offset, read_clamp, members = (
        operands.reader(text, "u32") for text in instruction.operands[2:]
    )

    def step(state: LaunchState) -> None:
        threads = state.threads
        taking_part = _members(state, members)
        (offset, offset_defined), (clamp, clamp_defined) = read_offset(threads), read_clamp(threads)
        threads.require_defined(offset_defined, "the lane of a shuffle")
        threads.require_defined(clamp_defined, "the clamp of a shuffle")
        source_lane, in_range = _source_lane(mode, threads.lane, offset, clamp)
        source = np.arange(threads.count) - threads.lane + source_lane
        is_present = (taking_part >> source_lane.astype(np.uint32)) & np.uint32(1) == 1
        absent = threads.active_mask() & ~is_present
        if absent.any():
            raise Fault(f"shuffle from a lane that does not execute it, {threads.describe(absent)}")
        value, defined = read(threads)
        moved = None if defined is None else np.broadcast_to(defined, (threads.count,))[source]
        write(threads, np.broadcast_to(value, (threads.count,))[source], moved)
        if write_valid is not None:
            write_valid(threads, np.broadcast_to(in_range, (threads.count,)), None)

    return step


def _source_lane(mode: str, lane: Array, offset: Array, clamp: Array) -> tuple[Array, Array]:
    """Return the lane that is read, and whether it is within the segment."""
    offset, clamp = offset.astype(np.int64) & 31, clamp.astype(np.int64)
    segment = clamp >> 8 & 31
    lowest = lane & segment
    highest = lowest | (clamp & 31 & ~segment)
    source = {
        "bfly": lane ^ offset,
        "up": lane - offset,
        "down": lane + offset,
        "idx": lowest | (offset & ~segment),
    }[mode]
    in_range = source >= highest if mode == "up" else source <= highest
    return np.where(in_range, source, lane), in_range


def _vote(instruction: Instruction, operands: Operands) -> Step:
    mode, kind = instruction.opcode[2], instruction.opcode[-1]
    if (mode, kind) not in (("ballot", "b32"), *((m, "pred") for m in ("any", "all", "uni"))):
        raise unsupported(instruction.text)
    read, write = (
        operands.reader(instruction.operands[1], "pred"),
        operands.writer(instruction.operands[0], kind),
    )
    members = operands.reader(instruction.operands[2], "u32")

    def step(state: LaunchState) -> None:
        threads = state.threads
        executing = _members(state, members)
        value, defined = read(threads)
        threads.require_defined(defined, "a vote")
        votes = ballot(threads, np.broadcast_to(value, (threads.count,))) & executing
        found = {
            "ballot": votes,
            "any": votes != 0,
            "all": votes == executing,
            "uni": (votes == executing) | (votes == 0),
        }[mode]
        write(threads, found, None)

    return step


def _reduction(instruction: Instruction, operands: Operands) -> Step:
    name, *modifiers, kind = instruction.opcode[2:]
    join = _REDUCTIONS[name]
    if kind == "f32" and name in ("min", "max") and set(modifiers) <= {"abs", "NaN"}:
        extremum, nan = minimum if name == "min" else maximum, "NaN" in modifiers
        join = lambda a, b: extremum(a, b, nan)  # noqa: E731
    elif modifiers or kind not in (("b32",) if name in _BITWISE else ("u32", "s32")):
        raise unsupported(instruction.text)
    read, write = (
        operands.reader(instruction.operands[1], kind),
        operands.writer(instruction.operands[0], kind),
    )
    members = operands.reader(instruction.operands[2], "u32")

    def step(state: LaunchState) -> None:
        threads = state.threads
        taking_part = _members(state, members)
        value, defined = _broadcast(read(threads), threads.count)
        threads.require_defined(defined, "an operand of a reduction")
        if "abs" in modifiers:
            value = np.abs(value)
        found = value.copy()
        # the first lane of each group of lanes that take part together
        lowest = (taking_part & (~taking_part + np.uint32(1))) == _LANE_BITS[threads.lane]
        for first in np.flatnonzero(threads.active_mask() & lowest):
            lanes = (
                np.flatnonzero(int(taking_part[first]) & _LANE_BITS) + first - threads.lane[first]
            )
            total = value[lanes[:1]]
            for lane in lanes[1:]:
                total = join(total, value[lane : lane + 1])
            found[lanes] = total[0]
        write(threads, found, None)

    return step


def _broadcast(value: Value, count: int) -> Value:
    return np.broadcast_to(value[0], (count,)), value[1]
