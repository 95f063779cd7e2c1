"""Clocks of a GPU are read from nvidia-smi where it works."""

from pathlib import Path

from bench.gpu.clocks import FIELDS, gpu_state

TOOLS = Path(__file__).parents[1] / "fake_tools"


def test_the_state_of_a_gpu_is_read():
    found = gpu_state("fake", str(TOOLS))
    assert list(found) == list(FIELDS.values())
    assert (found["max_sm_mhz"], found["pcie_generation"], found["watts"]) == (1980, 5, None)


def test_a_failing_or_missing_nvidia_smi_gives_no_state(tmp_path):
    assert gpu_state("of no GPU", str(TOOLS)) == {}
    assert gpu_state("fake", str(tmp_path)) == {}
    program = tmp_path / "nvidia-smi"
    for text in ("#!/bin/sh\n", "#!/bin/sh\necho 345, 1980\n", "#!/no/interpreter\n"):
        program.write_text(text)
        program.chmod(0o755)
        assert gpu_state("fake", str(tmp_path)) == {}
