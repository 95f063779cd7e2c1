"""Optimizers of trainable embeddings: torch's steps, several ranks, states and bad input."""

import copy
import itertools
import math
import pickle
import time

import numpy as np
import pytest
import torch
from limits import HANG_S
from optim.teams import of_group, step_all
from processes import results, workers
from torch import nn

from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.features import EmbeddingTable
from gcnzc.optim import SparseAdagrad, SparseAdam, SparseSGD
from gcnzc.optim.embedding import row_exchange
from gcnzc.system import row_memory

NUM_ROWS, NUM_COLUMNS, BATCH = 40, 6, 24
ADAGRAD = {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2}
KINDS = {
    "sgd": lambda tables, **options: SparseSGD(tables, lr=0.05, **options),
    "adagrad": lambda tables, **options: SparseAdagrad(tables, **ADAGRAD, **options),
    "adam": lambda tables, **options: SparseAdam(tables, lr=0.05, **options),
}
TORCHS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, **ADAGRAD),
    "adam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}


def make_table(dtype=torch.float64, num_rows=NUM_ROWS, seed=3):
    return EmbeddingTable(num_rows, NUM_COLUMNS, dtype=dtype, seed=seed)


def ids_of(step, count=BATCH, num_rows=NUM_ROWS):
    # rows of the first half are more frequent, so that there are duplicates
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(num_rows, (2, count), generator=generator)
    return ids.amin(0)


def loss_of(rows, ids):
    weights = torch.linspace(-1, 1, NUM_COLUMNS, dtype=rows.dtype)
    targets = (ids % 3).to(rows.dtype)
    return ((rows @ weights).tanh() - targets).square().mean()


def team(name, world_size, dtype=torch.float64, **options):
    tables = [make_table(dtype) for _ in range(world_size)]
    make = lambda table, group: KINDS[name](table, group=group, **options)  # noqa: E731
    return tables, of_group(tables, make)


def backward(table, optimizer, ids):
    """The backward pass of a rank, with its share of the ids."""
    rank, world_size = optimizer.group.rank, optimizer.group.world_size
    share = ids[len(ids) * rank // world_size : len(ids) * (rank + 1) // world_size]
    optimizer.zero_grad()
    optimizer.weight = len(share) * world_size / len(ids)
    if len(share):
        loss_of(table.gather(share), share).backward()


def train(tables, optimizers, end, begin=0):
    for step in range(begin, end):
        for table, optimizer in zip(tables, optimizers, strict=True):
            backward(table, optimizer, ids_of(step))
        outcome = step_all(optimizers)
    return outcome


def state_of(optimizer):
    return [
        optimizer.state[table.rows][name]
        for table in optimizer.tables.values()
        for name in (*optimizer.state_names, "step")
    ]


def are_equal(first, second):
    pairs = zip(state_of(first), state_of(second), strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_steps_equal_those_of_torch_with_sparse_gradients(name, dtype):
    table = make_table(dtype)
    dense = nn.Embedding.from_pretrained(table.rows.clone(), freeze=False, sparse=True)
    own, theirs = KINDS[name](table), TORCHS[name](dense.parameters())
    for step in range(30):
        ids = ids_of(step)
        own.zero_grad()
        theirs.zero_grad()
        loss_of(table.gather(ids), ids).backward()
        loss_of(dense(ids), ids).backward()
        own.step()
        theirs.step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(table.rows, dense.weight.data, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(table.rows, make_table(dtype).rows, atol=0.1)
    for state_name in own.state_names:
        found = own.state[table.rows][state_name]
        expected = theirs.state[dense.weight][state_name]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_equal_one_worker_and_each_other(name, world_size):
    one, [optimizer] = team(name, 1)
    train(one, [optimizer], 20)
    tables, optimizers = team(name, world_size)
    train(tables, optimizers, 20)
    torch.testing.assert_close(tables[0].rows, one[0].rows, rtol=0, atol=1e-9)
    for table, other in zip(tables[1:], optimizers[1:], strict=True):
        assert torch.equal(table.rows, tables[0].rows)
        assert are_equal(other, optimizers[0])


@pytest.mark.parametrize("name", KINDS)
def test_results_do_not_depend_on_threads(name):
    found = []
    for threads in (1, 2, 8):
        table = make_table(torch.float32, 5000)
        optimizer = KINDS[name](table, threads=threads)
        for step in range(3):
            ids = ids_of(step, 20_000, 5000)
            loss_of(table.gather(ids, threads=threads), ids).backward()
            optimizer.step()
        found.append(table.rows)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("dtype", "id_bytes"), [(torch.float32, 4), (torch.float64, 4), (torch.float64, 8)]
)
def test_sent_bytes_are_those_of_the_formula(dtype, id_bytes, monkeypatch):
    expected, optimizers = team("adagrad", 3, dtype)
    train(expected, optimizers, 2)
    if id_bytes == 8:
        # as of a large table
        monkeypatch.setattr(row_exchange, "MAX_INT32", NUM_ROWS - 1)
    tables, optimizers = team("adagrad", 3, dtype)
    outcome = train(tables, optimizers, 2)
    assert torch.equal(tables[0].rows, expected[0].rows)
    for part, ledger in zip(ids_of(1).split(BATCH // 3), outcome.ledgers, strict=True):
        row_bytes = id_bytes + NUM_COLUMNS * dtype.itemsize
        assert ledger.bytes_sent == 2 * (8 * 3 + len(part.unique()) * row_bytes)


def test_several_tables_share_one_exchange_of_counts():
    def make(rank, world_size):
        tables = {"paper": make_table(seed=1), "author": make_table(torch.float32, 10, seed=2)}
        return tables, SparseAdam(tables, group=Group(rank, world_size))

    teams = [make(rank, 2) for rank in range(2)]
    for _ in range(2):
        for tables, optimizer in teams:
            rank = optimizer.group.rank
            rows = tables["paper"].gather([rank, 5]).sum() + tables["author"].gather([7]).sum()
            rows.backward()
        # the first step compares the tables
        outcome = lockstep([optimizer.algorithm() for _, optimizer in teams])
    for name in ("paper", "author"):
        assert torch.equal(teams[0][0][name].rows, teams[1][0][name].rows)
    requests = {kind: entry.requests for kind, entry in outcome.ledgers[0].entries.items()}
    assert requests == {"AllGather": 1, "AllToAll": 4}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_all_ranks_skip_a_step_if_a_gradient_of_one_is_not_finite(bad):
    tables, optimizers = team("adam", 3)
    train(tables, optimizers, 3)
    before = tables[0].rows.clone()
    states = [torch.as_tensor(each).clone() for each in state_of(optimizers[0])]
    for rank, (table, optimizer) in enumerate(zip(tables, optimizers, strict=True)):
        scale = torch.ones(2, NUM_COLUMNS, dtype=torch.float64)
        scale[1, 2] = bad if rank == 1 else 1.0
        (table.gather([rank, 7]) * scale).sum().backward()
        assert optimizer.skip_reason == ""
    step_all(optimizers)
    for table, optimizer in zip(tables, optimizers, strict=True):
        assert optimizer.skip_reason.endswith("not finite or too large: rank 1 has 1")
        assert (optimizer.skipped, optimizer.steps) == (1, 3)
        assert torch.equal(table.rows, before)
        assert len(table.take_gradients()[0]) == 0
        pairs = zip(states, state_of(optimizer), strict=True)
        assert all(torch.equal(a, torch.as_tensor(b)) for a, b in pairs)
    train(tables, optimizers, 5, 3)
    assert torch.equal(tables[0].rows, tables[2].rows)
    assert tables[0].rows.isfinite().all()
    assert optimizers[0].skip_reason == ""


def train_as_worker(steps):
    with init_group() as group:
        table = make_table()
        optimizer = KINDS["adagrad"](table, group=group)
        for step in range(steps):
            backward(table, optimizer, ids_of(step))
            optimizer.step()
        return table.rows, group.ledger.bytes_sent


def test_processes_equal_the_simulation(tmp_path):
    ranks = results(2, tmp_path, train_as_worker, 5)
    tables, optimizers = team("adagrad", 2)
    train(tables, optimizers, 5)
    for (rows, sent), table in zip(ranks, tables, strict=True):
        assert torch.equal(rows, table.rows)
        assert sent > 0


def test_options_that_differ_between_ranks_are_an_error_on_all():
    tables, optimizers = team("adam", 2)
    train(tables, optimizers, 2)
    before = tables[0].rows.clone()
    optimizers[1].param_groups[0]["lr"] = 0.06
    message = r"lr of parameter group 0 differs between ranks: 0\.05 on rank 0, 0\.06 on rank 1"
    with pytest.raises(ValueError, match=message):
        train(tables, optimizers, 3, 2)
    assert torch.equal(tables[0].rows, before)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_run_resumes_bit_for_bit_also_with_other_ranks(name, world_size, by_file, tmp_path):
    tables, optimizers = team(name, 2)
    train(tables, optimizers, 4)
    optimizers[0].param_groups[0]["lr"] = optimizers[1].param_groups[0]["lr"] = 0.02
    resumed, own = team(name, world_size)
    path = tmp_path / "state.npz"
    if by_file:
        optimizers[0].save(path)
    for table, optimizer in zip(resumed, own, strict=True):
        # a pending gradient of an interrupted step
        table.gather([0]).sum().backward()
        if by_file:
            optimizer.load(path)
        else:
            table.load_state_dict(tables[0].state_dict())
            optimizer.load_state_dict(optimizers[1].state_dict())
        assert are_equal(optimizer, optimizers[0])
        assert optimizer.steps == 4
        assert optimizer.param_groups[0]["lr"] == 0.02
    train(resumed, own, 8, 4)
    train(tables, optimizers, 8, 4)
    if world_size == 2:
        assert torch.equal(resumed[0].rows, tables[0].rows)
        assert are_equal(own[1], optimizers[0])
    # sums over other numbers of ranks round differently
    torch.testing.assert_close(resumed[-1].rows, tables[0].rows, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_unpickled_optimizers_go_on_like_the_original(name):
    tables, optimizers = team(name, 2)
    train(tables, optimizers, 3)
    pair = tables, optimizers
    pairs = [pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    before = tables[0].rows.clone()
    for others, copied in reversed(pairs):
        # the steps of a copy do not change the original
        assert torch.equal(tables[0].rows, before)
        train(others, copied, 6, 3)
    for others, copied in pairs[1:]:
        assert torch.equal(others[1].rows, tables[0].rows)
        assert are_equal(copied[1], optimizers[0])


def saved_run(tmp_path, steps=3, **options):
    table = make_table()
    optimizer = SparseAdam({"paper": table}, **options)
    for step in range(steps):
        loss_of(table.gather(ids_of(step)), ids_of(step)).backward()
        optimizer.step()
    optimizer.save(tmp_path / "state.npz")
    return table, optimizer


def test_numpy_and_a_table_without_an_optimizer_read_a_saved_file(tmp_path):
    table, optimizer = saved_run(tmp_path)
    with np.load(tmp_path / "state.npz") as found:
        assert np.array_equal(found["paper/rows"], table.rows.numpy())
        assert np.array_equal(found["paper/exp_avg"], optimizer.state[table.rows]["exp_avg"])
    loaded = EmbeddingTable.load(tmp_path / "state.npz", "paper/rows")
    assert torch.equal(loaded.rows, table.rows)
    first = (tmp_path / "state.npz").read_bytes()
    optimizer.save(tmp_path / "state.npz")
    assert (tmp_path / "state.npz").read_bytes() == first


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, 0.999])
def test_a_damaged_or_short_file_is_rejected_and_changes_nothing(place, tmp_path):
    saved_run(tmp_path)
    path = tmp_path / "state.npz"
    data = bytearray(path.read_bytes())
    other = make_table(seed=8)
    optimizer = SparseAdam({"paper": other})
    before = other.rows.clone()
    index = int(len(data) * place)
    data[index] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"state\.npz.* is damaged"):
        optimizer.load(path)
    path.write_bytes(data[:index])
    with pytest.raises(ValueError, match=r"state\.npz is damaged"):
        optimizer.load(path)
    assert torch.equal(other.rows, before)
    assert optimizer.steps == 0


def test_states_of_others_are_rejected(tmp_path):
    table, optimizer = saved_run(tmp_path)
    path = tmp_path / "state.npz"
    for state in (path, optimizer.state_dict()):
        how = "load" if state is path else "load_state_dict"
        with pytest.raises(ValueError, match=r"is of SparseAdam, not of SparseAdagrad"):
            getattr(SparseAdagrad({"paper": make_table()}), how)(state)
        with pytest.raises(ValueError, match=r"\(40, 6\)"):
            getattr(SparseAdam({"paper": make_table(num_rows=39)}), how)(state)
        with pytest.raises(ValueError, match="float32"):
            getattr(SparseAdam({"paper": make_table(torch.float32)}), how)(state)
        two = SparseAdam({"paper": make_table(), "author": make_table()})
        with pytest.raises(ValueError, match="tables"):
            getattr(two, how)(state)
    with pytest.raises(ValueError, match="no array 'author/rows', but paper/rows"):
        SparseAdam({"author": table}).load(path)
    with pytest.raises(FileNotFoundError, match=r"no file .*none\.npz"):
        optimizer.load(tmp_path / "none.npz")
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr of the state is nan"):
        optimizer.load_state_dict(state)


def save_again_and_again(path):
    table = EmbeddingTable(200_000, 64, init="zeros")
    optimizer = SparseAdagrad(table)
    for step in itertools.count(1):
        table.rows.fill_(step)
        optimizer.state[table.rows]["sum"].fill_(step)
        optimizer.save(path)


def test_a_kill_while_saving_leaves_a_whole_file(tmp_path):
    path = tmp_path / "state.npz"
    with workers(1, tmp_path, save_again_and_again, path) as [process]:
        end = time.monotonic() + HANG_S
        while not (path.exists() and list(tmp_path.glob(".*partial*"))):
            assert time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        process.join()
    table = EmbeddingTable(200_000, 64, init="zeros")
    optimizer = SparseAdagrad(table)
    optimizer.load(path)
    step = float(table.rows[0, 0])
    assert step >= 1
    assert (table.rows == step).all()
    assert (optimizer.state[table.rows]["sum"] == step).all()


def test_wrong_tables_are_rejected(tmp_path):
    EmbeddingTable(4, 2, path=tmp_path / "rows.npy")
    read_only = EmbeddingTable.open(tmp_path / "rows.npy", read_only=True)
    with pytest.raises(ValueError, match="table 'paper' is read-only"):
        SparseAdam({"paper": read_only})
    with pytest.raises(ValueError, match="tables is empty"):
        SparseAdam({})
    table = make_table()
    with pytest.raises(ValueError, match="two of a, b are one table"):
        SparseAdam({"a": table, "b": table})
    with pytest.raises(TypeError, match="group is a str"):
        SparseAdam(table, group="gloo")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((SparseAdam, "lr", value) for value in (-1.0, math.nan)),
        *((SparseAdam, "betas", (0.9, 1.0)), (SparseAdam, "eps", -1e-8)),
        *((SparseAdagrad, name, -1) for name in ("lr_decay", "initial_accumulator_value")),
        *((SparseAdagrad, "initial_accumulator_value", math.inf), (SparseSGD, "threads", 0)),
    ],
)
def test_wrong_options_are_rejected(kind, name, value):
    wrong = rf"betas\[1\] is {value[1]}" if name == "betas" else f"{name} is {value}"
    with pytest.raises(ValueError, match=wrong):
        kind(make_table(), **{name: value})


def test_an_id_that_a_gpu_did_not_check_does_not_write_outside_the_table():
    table = make_table()
    optimizer = SparseAdam({"paper": table})
    rows = table.gather([1])
    rows.sum().backward()
    [(number, (_, leaf))] = table._pending.items()
    table._pending[number] = (torch.tensor([NUM_ROWS]), leaf)
    with pytest.raises(IndexError, match="id 40 is not in table 'paper' of 40 rows"):
        optimizer.step()


def test_too_little_memory_for_the_state_is_an_error_with_the_bytes(monkeypatch):
    table = make_table()
    monkeypatch.setattr(row_memory, "available_bytes", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"state exp_avg of the table.* needs 1,920 bytes"):
        SparseAdam(table)
