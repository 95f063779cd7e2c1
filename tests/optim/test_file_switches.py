from collections import Counter

import torch
from optim.file_switches import count_outside, count_switches, trace_on_processes

from gcnzc.optim.flat_parameters import tiles
from gcnzc.optim.synchronous.one_bit_adam import FreezeRule


def test_a_step_of_one_bit_adam_rarely_moves_to_another_file(tmp_path):
    switches, _ = trace_on_processes(2, tmp_path)
    # what runs is the whole step, over processes
    assert switches["compress/two_stage.py", "kernels/codec/signs.py"] > 3
    assert switches["exchange/group.py", "exchange/process_group.py"] > 0
    # the paths inside of the exchange and of kernels are those of other tests
    assert count_outside(switches, "exchange", "kernels") < 35
    assert count_outside(switches, "exchange") < 50
    assert switches.total() < 100


def test_calls_and_turns_of_generators_in_another_file_count():
    def run():
        rule = FreezeRule(0.9)
        for _ in tiles(0, 3, torch.device("cpu")):
            rule.is_due(10)

    switches, calls = count_switches(run)
    # this test is no file of gcnzc
    assert switches == Counter()
    # the turn that ends the generator counts too
    assert calls["optim/flat_parameters.py"] == 2
