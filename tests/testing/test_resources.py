"""Resources of kernels: bytes in flight by the machine code, and resident blocks by the limits."""

import pytest

from gcnzc.testing import KernelResources
from gcnzc.testing.resources import Instruction, measure_loads, parse


def code_of(*lines):
    """Instructions from waits, the scoreboard of the result or 7 for none, and their text."""
    rows = []
    for number, (waits, result, text) in enumerate(lines):
        rows.append(f"        /*{16 * number:04x}*/      {text} ;     /* 0x0000000000000000 */")
        rows.append(f"        /* 0x{waits << 52 | result << 46 | 1 << 41:016x} */")
    return list(parse("\n".join(rows)))


WIDE = (0, 0, "LDG.E.128 R4, desc[UR6][R2.64]")
LOADS = [WIDE, (0, 1, "@P0 LDG.E.64 R8, [R2.64]"), (0, 1, "@!P0 LDG.E R10, [R2.64]")]
WAIT = (1, 7, "IADD3 R4, R4, R4, RZ")


def test_instructions_are_read_with_their_control_information():
    found = code_of(WIDE, (5, 7, "@!UP0 BRA `(.L_x_1)"), WAIT)
    assert found[0] == Instruction(0, "LDG.E.128", False, 0, 0)
    assert found[1] == Instruction(16, "BRA", True, 5, None)
    assert found[2] == Instruction(32, "IADD3", False, 1, None)


def test_loads_are_in_flight_until_an_instruction_waits_for_their_scoreboard():
    assert measure_loads(code_of(*LOADS)) == (16, 28)
    # the first is waited for, and then another one is issued
    assert measure_loads(code_of(*LOADS, WAIT, WIDE)) == (16, 28)
    assert measure_loads(code_of(WIDE, WAIT, *LOADS[1:])) == (16, 16)
    # a load waits for others before it is issued
    assert measure_loads(code_of(WIDE, (1, 1, "LDG.E.128 R8, [R4.64]"))) == (16, 16)
    # two scoreboards at once
    assert measure_loads(code_of(*LOADS, (3, 7, "NOP"), WIDE)) == (16, 28)


def test_loads_behind_a_jump_are_apart():
    jump, byte = (0, 7, "BRA `(.L_x_1)"), (0, 1, "LDG.E.U8 R8, [R2.64]")
    assert measure_loads(code_of(WIDE, jump, byte)) == (16, 16)
    assert measure_loads(code_of(WIDE, (0, 7, "@P1 BRA `(.L_x_1)"), byte)) == (16, 17)
    assert measure_loads(code_of((0, 0, "LDS.128 R4, [R2]"), (0, 7, "STG.E [R2.64], R4"))) == (0, 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks"),
    [
        (80, 256, 32, 0, 8),  # 2048 threads
        (90, 256, 96, 0, 2),  # 5 warps of 3072 registers in each part
        (90, 256, 128, 0, 2),
        (90, 256, 129, 0, 1),
        (100, 256, 80, 0, 3),
        (100, 32, 16, 0, 32),  # blocks
        (86, 256, 32, 0, 6),  # 1536 threads
        (80, 128, 32, 40 << 10, 4),  # of 164 KiB, each block has 1 KiB more
        (90, 128, 32, 40 << 10, 5),
        (90, 1024, 255, 0, 0),  # cannot be launched
    ],
)
def test_resident_blocks_are_limited_by_the_scarcest_resource(
    arch, threads, registers, shared_bytes, blocks
):
    resources = KernelResources("k", arch, threads, registers, 0, 0, shared_bytes, 0, 16, 64)
    assert resources.blocks_per_multiprocessor == blocks
    assert resources.load_bytes_in_flight_per_multiprocessor == blocks * threads * 64
