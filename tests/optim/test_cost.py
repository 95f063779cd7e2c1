"""What a step is said to cost is what the formulas say, and what the exchange itself takes."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_graph import tiny
from torch import nn

from bench import harness
from bench.docs import network_tables, result_tables
from bench.network import cost as bench
from gcnzc.cli import main
from gcnzc.cli.commands import cost
from gcnzc.cli.commands.cost import CostConfig
from gcnzc.cli.reports import network as reports_network
from gcnzc.exchange import Choices, Sum, lockstep
from gcnzc.graph import load
from gcnzc.optim import cost as optim_cost
from gcnzc.optim.cost import METHODS, Computed, Cost, Network
from gcnzc.optim.defaults import LOCAL
from gcnzc.optim.synchronous import averaged

NETWORK = Network(100.0, delay_s=2e-3, message_s=5e-4)
ALPHA_S = 2.5e-3  # a message's latency there
# with a flag and two signals 840 elements, which 2 to 8 workers share evenly
MODEL = nn.ParameterList([nn.Parameter(torch.zeros(837))])
BYTES = 4 * 840
RING = dict.fromkeys(range(2, 9), "averaged, ring")  # the default method by workers
SMALL = ["--fanouts", "4,4", "--layers", "2", "--hidden", "16", "--batch-size", "32"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A small graph in OGB's layout."""
    folder = tmp_path_factory.mktemp("plan") / "raw"
    sizes = ["--nodes", "1500", "--edges", "6000", "--num-features", "16", "--classes", "4"]
    assert main(["make", str(folder), *sizes]) == 0
    return folder


def line(workers=4, method="averaged, ring", latency_s=0.0, serial_bytes=1e6, compute_s=0.1):
    cost = Cost(workers, method, int(serial_bytes), latency_s, serial_bytes)
    return reports_network.line_of(cost, Computed(compute_s), NETWORK)


@pytest.mark.parametrize(
    ("name", "workers", "messages", "vectors"),
    [
        *((name, w, 2 * (w - 1), 2 * (w - 1) / w) for name in ("ring", "builtin") for w in (2, 5)),
        *(("halving", w, 2 * math.log2(w), 2 * (w - 1) / w) for w in (2, 4, 8)),
        *(("doubling", w, math.log2(w), math.log2(w)) for w in (2, 4, 8)),
    ],
)
def test_a_cost_matches_its_formula(name, workers, messages, vectors):
    cost = optim_cost.step_cost(MODEL, workers, NETWORK, f"averaged, {name}")
    assert cost.latency_s == pytest.approx(messages * ALPHA_S, rel=1e-12)
    assert cost.serial_bytes == pytest.approx(vectors * BYTES, rel=1e-9)
    ask = Sum(torch.zeros(BYTES // 4))
    assert cost.sent_bytes == max(ask.sent_bytes(name, rank, workers) for rank in range(workers))


def test_a_rank_beyond_a_power_of_two_waits_twice():
    # its values go to the one beside it, which sends two messages after that, one after the other
    cost = optim_cost.step_cost(MODEL, 3, NETWORK, "averaged, doubling")
    assert cost.latency_s == pytest.approx(3 * NETWORK.message_s + 2 * NETWORK.delay_s, rel=1e-12)
    assert cost.serial_bytes == pytest.approx(3 * BYTES, rel=1e-9)
    assert cost.sent_bytes == 2 * BYTES


@pytest.mark.parametrize("workers", [2, 3, 6, 7])
@pytest.mark.parametrize("name", METHODS)
def test_a_cost_at_one_rate_predicts_other_rates(name, workers):
    cost = replace(optim_cost.step_cost(MODEL, workers, NETWORK, name), code_s=0.0)
    for mbit_per_s in (0.01, 1e4):
        network = Network(mbit_per_s, NETWORK.delay_s, NETWORK.message_s)
        models = [optim_cost._with_gradients(MODEL) for _ in range(workers)]
        parts = [(share, run(models, network.link)) for share, run in METHODS[name].parts]
        seconds = sum(share * max(run.seconds) for share, run in parts)
        assert cost.seconds(network.bytes_per_s) == pytest.approx(seconds, rel=1e-9)
        # the other way round
        rate = cost.mbit_per_s(seconds)
        assert rate == pytest.approx(mbit_per_s, rel=1e-4)


def test_uneven_shards_change_little():
    odd = nn.Linear(10, 67)
    cost = optim_cost.step_cost(odd, 7, NETWORK, "averaged, ring")
    assert cost.serial_bytes == pytest.approx(12 / 7 * 4 * (10 * 67 + 67 + 4), rel=0.01)


def test_gradients_of_every_dtype_are_sent():
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(7, 2).double()])
    model.append(nn.Linear(50, 50).requires_grad_(False))
    assert optim_cost.gradient_bytes(model) == {"float32": 4 * 20, "float64": 8 * 16}
    cost = optim_cost.step_cost(model, 2, NETWORK, "averaged, doubling")
    # two flags and two signals with each
    assert cost.sent_bytes == 4 * (20 + 4) + 8 * (16 + 4)
    assert cost.latency_s == pytest.approx(2 * ALPHA_S, rel=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_the_payload_of_a_link_is_less_than_its_rate():
    # two frames of 1448 B of payload and 66 B of headers, and the 66 B that acknowledge two others
    share = 2 * 1448 / (2 * (1448 + 66) + 66)
    assert Network(100.0).bytes_per_s == pytest.approx(share * 1e8 / 8, rel=1e-12)


def test_the_figures_of_a_line_are_consistent():
    told = line(latency_s=0.01, compute_s=0.2)
    exchange_s = 0.01 + 1e6 / NETWORK.bytes_per_s
    assert told["exchange_s"] == pytest.approx(exchange_s)
    assert told["step_s"] == pytest.approx(0.2 + exchange_s)
    assert told["exchange_share"] == pytest.approx(exchange_s / (0.2 + exchange_s))
    assert told["speed_up"] == pytest.approx(4 * 0.2 / (0.2 + exchange_s))
    cost = Cost(4, "averaged, ring", 0, 0.01, 1e6)
    easy = reports_network.line_of(cost, Computed(0.2), Network(told["easy_mbit_per_s"]))
    assert easy["exchange_share"] == pytest.approx(0.1)
    even = reports_network.line_of(cost, Computed(0.2), Network(told["even_mbit_per_s"]))
    assert even["speed_up"] == pytest.approx(1.0)


def test_overlapped_exchanges_are_not_waited_for():
    cost = Cost(4, "co2", 0, 0.01, 1e6, code_s=0.02, overlap_share=1.0)
    rate = NETWORK.bytes_per_s
    exchange_s = 0.03 + 1e6 / rate
    assert cost.seconds(rate) == pytest.approx(exchange_s)
    assert cost.waited_s(rate, exchange_s + 0.1) == 0
    assert cost.waited_s(rate, exchange_s - 0.04) == pytest.approx(0.04)
    told = reports_network.line_of(cost, Computed(exchange_s - 0.04), NETWORK)
    assert told["step_s"] == pytest.approx(exchange_s)
    easy = reports_network.line_of(
        cost, Computed(exchange_s - 0.04), Network(told["easy_mbit_per_s"])
    )
    assert easy["exchange_share"] == pytest.approx(0.1)


@pytest.mark.parametrize("workers", [2, 4, 5])
def test_methods_send_what_they_exchange(workers):
    model, elements = nn.ParameterList([nn.Parameter(torch.zeros(40_000))]), 40_000
    sent = {
        name: optim_cost.step_cost(model, workers, NETWORK, name).sent_bytes for name in METHODS
    }
    whole = sent["averaged, ring"]
    assert whole == pytest.approx(2 * (workers - 1) / workers * 4 * elements, rel=1e-3)
    signs = 2 * (workers - 1) / workers * elements / 8
    assert sent["onebit-adam"] == pytest.approx(0.15 * whole + 0.85 * signs, rel=0.35)
    for name in ("local-sgd", "diloco", "streaming-diloco", "co2"):
        assert sent[name] == pytest.approx(whole / LOCAL[name].local_steps, rel=0.05)
    # 2 bits, and a scale of 32 bits for 256 elements
    coded = whole * (2 + 32 / 256) / 32
    assert sent["muloco"] == pytest.approx(coded / LOCAL["muloco"].local_steps, rel=0.05)


def test_no_rate_compensates_latency():
    told = line(latency_s=1.0, compute_s=0.2)
    assert told["easy_mbit_per_s"] is None
    assert told["even_mbit_per_s"] is None


def test_one_worker_may_be_the_fastest():
    lines = [line(2, serial_bytes=1e7), line(4, serial_bytes=2e7)]
    chosen = reports_network.advice(lines, RING)
    assert (chosen["choose_workers"], chosen["choose_method"]) == (1, None)
    assert chosen["speed_up"] == 1.0
    assert chosen["why"].startswith("one worker is faster: 4 workers reach 0.")
    assert (
        f"more than {reports_network.format_number(lines[1]['even_mbit_per_s'])} Mbit/s would"
        in chosen["why"]
    )
    hopeless = reports_network.advice([line(2, latency_s=1.0)], RING)
    assert "no bandwidth is enough" in hopeless["why"]


def test_most_workers_are_chosen_if_faster():
    lines = [line(2), line(8)]
    chosen = reports_network.advice(lines, RING)
    assert chosen["choose_workers"] == 8
    assert chosen["speed_up"] == lines[1]["speed_up"]
    easy = lines[1]["easy_mbit_per_s"]
    assert (
        f"most of it transfer: {reports_network.format_number(easy)} Mbit/s would reduce it to 10%"
        in chosen["why"]
    )


def test_fewer_workers_are_chosen_if_as_fast():
    lines = [line(2, serial_bytes=0.0), line(8, latency_s=0.2063)]
    assert lines[0]["speed_up"] < lines[1]["speed_up"]
    chosen = reports_network.advice(lines, RING)
    assert chosen["choose_workers"] == 2
    assert f"and 8 workers reach no more than {lines[1]['speed_up']:.2f} times" in chosen["why"]
    assert "more bandwidth would help little" in chosen["why"]


def test_latency_is_named_as_the_cause():
    chosen = reports_network.advice([line(8, latency_s=0.2)], RING)
    assert "most of it latency and message overhead" in chosen["why"]


@pytest.mark.parametrize(
    ("value", "text"), [(3024.3, "3,020"), (0.30449, "0.304"), (12.0, "12"), (99999, "100,000")]
)
def test_numbers_are_shown_with_three_digits(value, text):
    assert reports_network.format_number(value) == text


def test_times_below_a_second_are_shown_in_milliseconds():
    assert reports_network.format_seconds(0.0123456) == "12.3 ms"
    assert reports_network.format_seconds(1.23456) == "1.23 s"


@pytest.mark.parametrize(("serial_bytes", "method"), [(1.02e6, "default"), (2e6, "other")])
def test_the_default_method_unless_another_is_clearly_faster(serial_bytes, method):
    lines = [line(method="other"), line(method="default", serial_bytes=serial_bytes)]
    defaults = dict.fromkeys(range(2, 9), "default")
    assert reports_network.advice(lines, defaults)["choose_method"] == method


def test_training_uses_the_default_method():
    found = set()
    for size in (10, 100_000):
        for workers in (2, 64):
            model = nn.Linear(size, 1)
            taken = Choices().find(Sum(torch.zeros(size + 1)), workers)
            assert optim_cost.default_method(model, workers) == f"averaged, {taken}"
            found.add(taken)
    assert found == {"doubling", "halving", "builtin"}


def test_measuring_leaves_torch_alone(graph):
    torch.manual_seed(1)
    wanted, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(1)
    config = CostConfig(
        data=graph, steps=2, threads=1, fanouts=(3, 3), layers=2, hidden=8, batch_size=512
    )
    loaded = load.load(graph)
    computed = cost.measure_step(config, loaded)
    cost.build_model(config, loaded)
    # more steps than there are minibatches in an epoch
    assert computed.steps == 2
    assert 0 < computed.seconds < 60
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(3), wanted)


def test_the_command(graph, tmp_path, capsys):
    picture = tmp_path / "p.png"
    words = ["--workers", "2,3", "--mbit-per-s", "100", "--delay-ms", "2", "--message-us", "500"]
    words += ["--step-s", "0.05", "--out", str(picture)]
    capsys.readouterr()
    assert main(["cost", str(graph), *SMALL, *words]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    lines, chosen = found["costs"], found["choice"]
    assert [(each["workers"], each["method"]) for each in lines] == [
        (workers, method) for workers in (2, 3) for method in METHODS
    ]
    # SAGE of 16 columns: two matrices and a bias a layer
    parameters = 2 * 16 * 16 + 16 + 2 * 16 * 4 + 4
    assert {each["compute_s"] for each in lines} == {0.05}
    assert found["parameters"] == parameters
    assert found["gradient_bytes"] == {"float32": 4 * parameters}
    assert (found["measured_steps"], found["hidden"]) == (0, 16)
    assert chosen["choose_workers"] == 3
    assert chosen["why"] in err
    assert "workers  method" in err
    assert picture.stat().st_size > 1000


def test_the_command_measures_what_it_is_not_given(graph, capsys):
    capsys.readouterr()
    assert main(["cost", str(graph), *SMALL, "--workers", "2", "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["measured_steps"] == 3
    assert "the median of 3 measured steps" in err


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--workers", "4,1"], "--workers must be at least 2, got 1", "--workers"),
        (["--mbit-per-s", "0"], "--mbit-per-s must be above 0, got 0", "for the default"),
        (["--step-s", "nan"], "--step-s must be finite, got nan", "the default"),
        (["--delay-ms", "-1"], "--delay-ms must be at least 0, got -1", "for the default"),
        (["--steps", "0"], "--steps must be at least 1, got 0", "for the default"),
        (["--fanouts", "5,5"], "2 fanouts (5,5) for 3 layers", "--layers 2"),
    ],
)
def test_invalid_options_are_rejected(words, error, hint, capsys):
    capsys.readouterr()
    assert main(["cost", "x", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"error: {error}" in err
    assert hint in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((0.0,), "a link of 0.0 Mbit/s"),
        ((math.inf,), "a link of inf Mbit/s"),
        ((1.0, -1.0), "a delay of -1.0 s"),
        ((1.0, 0.0, math.nan), "a time of a message of nan s"),
    ],
)
def test_invalid_networks_are_rejected(words, message):
    with pytest.raises(ValueError, match=message) as error:
        Network(*words)
    assert "\n\nhint: " in str(error.value)


def test_a_graph_without_features(tmp_path, capsys):
    tiny().but(features=None).write(tmp_path / "raw")
    assert main(["cost", str(tmp_path / "raw"), "--step-s", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "has no features to train on" in err


def test_a_picture_has_every_method_at_the_rate_that_was_asked_for():
    costs = optim_cost.step_costs(MODEL, [2, 3], NETWORK)
    times = reports_network.step_time_points(costs, Computed(0.5), NETWORK, "g")
    assert [list(curves) for curves in times.curves.values()] == [list(METHODS)] * 2
    for each in costs:
        points = times.curves[each.workers][each.method]
        for rate, seconds in points:
            waited_s = each.waited_s(Network(rate).bytes_per_s, 0.5)
            assert seconds == pytest.approx(0.5 + waited_s)
        assert any(rate == pytest.approx(NETWORK.mbit_per_s) for rate, _ in points)


def test_steps_of_a_trace_after_the_warm_up_count():
    # of three steps an epoch, where the first ten of a run are not traced
    lanes = {"worker 0, model": 4, "worker 1, model": 5}
    events = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
        for name, tid in lanes.items()
    ]
    for number in range(8):
        for tid in lanes.values():
            begin = 1e6 * (number + number * number) + tid
            spans = {"wait": (begin - 9e5, 9e5), "compute": (begin, 1e6), "exchange": (begin, 2e5)}
            events += [
                {"ph": "X", "name": name, "tid": tid, "ts": ts, "dur": dur}
                for name, (ts, dur) in spans.items()
            ]
    counted = list(bench._steps(events, 3))
    # steps 11 (of epoch 3), 14 and 17, the last of their epochs
    assert [epoch for epoch, _ in counted] == [3, 4, 5]
    assert [step.seconds for _, step in counted] == pytest.approx([2.0, 8.0, 14.0])
    assert [step.exchange_s for _, step in counted] == pytest.approx([0.2] * 3)


def test_measured_step_times_are_recorded_where_the_documentation_reads_them(
    graph, tmp_path, monkeypatch
):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["cost", str(graph), "--mbit-per-s", "10"])
    steps = {rate: [bench.Step(0.5, 0.1)] * 4 for rate in (bench.NO_LIMIT, 10.0)}
    monkeypatch.setattr(bench, "trained", lambda *_: bench.Trained(steps, {10.0: 1e6}))
    bench.compare(bench._options(), 2)
    table = network_tables.step_time()
    assert "| 2 | 10" in table


def test_the_layout_exchange_of_the_first_step_is_not_counted():
    once = lockstep(
        [averaged.Gradients(MODEL.named_parameters()).determine_layout(2) for _ in "ab"]
    )
    assert once.ledgers[0].bytes_sent > 0
    cost = optim_cost.step_cost(MODEL, 2, NETWORK, "averaged, doubling")
    assert cost.sent_bytes == BYTES
