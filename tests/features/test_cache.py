"""Feature caches: predicted hit rates are correct, and cached tables gather the same rows."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_driver import FakePeers

import gcnzc
from bench.loading.feature_cache import count_accesses
from gcnzc.datasets.generate import Shape, make
from gcnzc.features import access_counts, cache, peer_memory
from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.gather.cached_rows import make_cached_rows
from gcnzc.loader import presampling
from gcnzc.loader.loader import Loader
from gcnzc.train import record
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.run import train
from gcnzc.train.values import parse_share

SHARES = [0.01, 0.05, 0.2]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Graphs and their training nodes, by kind; each is made once."""
    folder, known = tmp_path_factory.mktemp("hot"), {}

    def get(name) -> tuple[Graph, torch.Tensor]:
        if name not in known:
            make(folder / name, name, Shape(60_000, 500_000, 4, 4), seed=1)
            data = gcnzc.load(folder / name)
            known[name] = data.graph, data.split["train"]
        return known[name]

    return get


@pytest.fixture(scope="module")
def small(graphs):
    graph, seeds = graphs("rmat")
    return graph, seeds[:4000]


def table_for(graph, columns=6):
    chosen = torch.Generator().manual_seed(7)
    return FeatureTable(torch.randn(graph.num_nodes, columns, generator=chosen))


def sizes_of(graph):
    return [round(share * graph.num_nodes) for share in SHARES]


def check_prediction(graph, seeds, fanouts, batch_size, batches=100):
    """By both rankings, at every size; what is measured is what a run's table counts."""
    counted = presampling.presample(graph, seeds, fanouts, batch_size, batches=batches)
    sizes, by_degree = sizes_of(graph), access_counts.rank_by_score(graph.in_degrees())
    loader = Loader(graph, None, seeds, fanouts, batch_size)
    fresh = count_accesses(loader, max(20, len(loader)))
    rates, ranked = access_counts.compute_hit_rates, access_counts.rank_by_score(counted.scores)
    found = [
        (counted.hit_rates(sizes), rates(ranked, fresh, sizes)),
        (rates(by_degree, sum(counted.halves), sizes), rates(by_degree, fresh, sizes)),
    ]
    for predicted, measured in found:
        assert predicted == pytest.approx(measured, abs=0.03, rel=0)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        # the minibatches that are measured are a sample too
        assert mine > theirs - 0.003, found


@pytest.mark.parametrize("kind", ["planted", "rmat"])
@pytest.mark.parametrize(("fanouts", "batch_size"), [([15, 10, 5], 1024), ([5, 5], 256)])
def test_predicted_hit_rates_agree_with_measured_ones_on_generated_graphs(
    kind, fanouts, batch_size, graphs
):
    check_prediction(*graphs(kind), fanouts, batch_size)


def test_presampling_depends_only_on_the_seed(small):
    graph, seeds = small
    one = presampling.presample(graph, seeds, [5, 5], 64, seed=3, batches=20, threads=1)
    again = presampling.presample(graph, seeds, [5, 5], 64, seed=3, batches=20, threads=5)
    other = presampling.presample(graph, seeds, [5, 5], 64, seed=4, batches=20)
    assert torch.equal(one.scores, again.scores)
    for place in (0, 1):
        assert torch.equal(one.halves[place], again.halves[place])
        assert not torch.equal(one.halves[place], other.halves[place])
    assert not torch.equal(*one.halves)
    assert one.batches == 10


def test_invalid_presampling_arguments_are_rejected(small):
    graph, seeds = small
    for batches, message in ((3, "batches is 3"), (5, "batches is 5, which is odd")):
        with pytest.raises(ValueError, match=message):
            presampling.presample(graph, seeds, [5], 64, batches=batches)
    with pytest.raises(ValueError, match="nodes"):
        presampling.presample(graph, torch.tensor([10**6]), [5], 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float64])
@pytest.mark.parametrize(("share", "gpus"), [(0.001, 1), (0.2, 1), (1.0, 1), (0.2, 2), (0.2, 5)])
def test_a_cached_table_gathers_the_same_rows(share, gpus, dtype, small):
    graph, _ = small
    table = FeatureTable((100 * table_for(graph).rows).to(dtype))
    scores = torch.rand(graph.num_nodes)
    where = {"device": "cpu"} if gpus == 1 else {"devices": ["cpu"] * gpus}
    mine = gcnzc.cached(table, share, scores, **where)
    own = access_counts.rank_by_score(scores)[: mine.num_cached : gpus]
    asked = hits = peer_hits = 0
    for count in (0, 1, 5000):
        for kind in (torch.int32, torch.int64):
            ids = torch.randint(graph.num_nodes, (count,), dtype=kind)
            out = torch.empty(count, table.num_columns, dtype=dtype)
            assert torch.equal(mine.gather(ids), table.gather(ids))
            assert mine.gather(ids, out, threads=2) is out
            assert torch.equal(out, table.gather(ids))
            asked, found = asked + 2 * count, torch.isin(ids, mine.cached_ids)
            hits += 2 * int(found.sum())
            peer_hits += 2 * int((found & ~torch.isin(ids, own)).sum())
    counters, row_bytes = mine.counters(), 6 * dtype.itemsize
    assert counters == cache.CacheCounters(asked, hits, row_bytes, peer_hits)
    assert counters.bytes_saved == hits * row_bytes
    assert counters.hit_rate == hits / asked
    assert counters.own_hit_rate == (hits - peer_hits) / asked
    assert share < 1 or counters.hit_rate == 1.0
    parts = "" if gpus == 1 else f"sharded over {gpus} GPUs, "
    assert repr(mine) == f"CachedTable({table!r}, {mine.num_cached} cached rows, {parts}not copied)"
    outside = torch.tensor([0, graph.num_nodes])
    with pytest.raises(IndexError, match=f"id {graph.num_nodes} is not in a table"):
        mine.gather(outside)
    assert gpus == 1 or mine.peer_hits(outside) == 0
    assert mine.counters().rows == asked
    mine.reset_counters()
    assert mine.counters() == cache.CacheCounters(0, 0, row_bytes)
    assert mine.counters().hit_rate == mine.counters().own_hit_rate == 0.0


def test_the_rows_with_the_highest_scores_are_cached():
    scores = torch.tensor([1.0, 5.0, 3.0, 5.0, 3.0, 0.0, 3.0])
    table = FeatureTable(torch.zeros(7, 2))
    for num_cached, expected in ((1, [1]), (2, [1, 3]), (4, [1, 2, 3, 4]), (7, list(range(7)))):
        mine = gcnzc.cached(table, num_cached / 7, scores, device="cpu")
        assert mine.cached_ids.tolist() == expected
        assert mine.num_cached == num_cached
        assert mine.hits(torch.arange(7)) == num_cached
    assert mine.hits(torch.tensor([7])) == -1


def test_cache_sizes_may_be_bytes(device):
    rows = torch.zeros(1000, 100)
    table, scores = FeatureTable(rows), torch.rand(1000)
    for num_cached in (1, 10, 1000):
        num_bytes = cache.cache_bytes(table, num_cached)
        mine = gcnzc.cached(table, num_bytes, scores, device="cpu")
        assert mine.num_cached == num_cached
        assert mine.cache_nbytes == num_bytes
        copies = make_cached_rows(rows, mine.cached_ids, device)
        assert copies.nbytes <= num_bytes
        assert gcnzc.cached(table, num_bytes + 100, scores, device="cpu").num_cached == num_cached
        with_copies = replace(mine, copies=copies)
        assert with_copies.cache_nbytes == copies.nbytes
    assert gcnzc.cached(table, 10**9, scores, device="cpu").num_cached == 1000


def test_a_ranking_of_another_graph_is_rejected():
    with pytest.raises(ValueError, match=r"a ranking of shape \(9,\) for a table of 10 rows"):
        gcnzc.cached(FeatureTable(torch.zeros(10, 2)), 0.5, torch.rand(9), device="cpu")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_table_that_a_gpu_cannot_read_is_rejected():
    table = FeatureTable(torch.zeros(10, 2))
    with pytest.raises(ValueError, match=r"cuda:0 cannot read the rows .* not page-locked"):
        gcnzc.cached(table, 0.5, torch.rand(10), device="cuda:0")
    sparse = FeatureTable(torch.eye(10).to_sparse_csr())
    with pytest.raises(ValueError, match=r"on cuda:0 needs dense rows.*\n\nhint: .*to_dense"):
        gcnzc.cached(sparse, 0.5, torch.rand(10), device="cuda:0")
    with pytest.raises(ValueError, match="all rows of this table are on meta"):
        gcnzc.cached(FeatureTable(torch.zeros(10, 2, device="meta")), 0.5, torch.rand(10))


# bytes beside a copy are no codes: they are multiplied too, and then dropped
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("scale_columns", [None, 7])
def test_gathers_on_a_gpu_read_the_copies_of_rows_as_stored(scale_columns, dtype, device):
    rows, ids = torch.randn(200, 30), torch.randint(200, (500,))
    table = FeatureTable(rows)
    if dtype != torch.float32:
        table = FeatureTable.quantized(rows, dtype, scale_columns=scale_columns)
    expected = table.gather(torch.arange(200))
    mine = gcnzc.cached(table, 0.3, torch.rand(200), device="cpu")
    assert torch.equal(mine.gather(ids), expected[ids])
    if device.type == "cuda":
        mine = replace(mine, rows=mine.rows.pin_memory())
    mine = replace(mine, copies=make_cached_rows(mine.rows, mine.cached_ids, device))
    mine.rows.view(torch.uint8)[mine.cached_ids] = 0
    for kind in (torch.int32, torch.int64):
        assert torch.equal(mine.gather(ids.to(device, kind)).cpu(), expected[ids])
    # the tally is the same one
    hits = 3 * int(torch.isin(ids, mine.cached_ids).sum())
    assert mine.counters() == cache.CacheCounters(1500, hits, 30 * dtype.itemsize)


@pytest.mark.triton
def test_gathers_on_several_gpus_read_the_copies(device, monkeypatch):
    """All of them are one device, which is the host under Triton's interpreter."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    rows = torch.randn(200, 30, pin_memory=device.type == "cuda")
    table, scores = FeatureTable(rows), torch.rand(200)
    mine = gcnzc.cached(table, 0.3, scores, devices=["cpu"] * 3)
    copies = peer_memory.make_sharded_rows(
        table.rows, access_counts.rank_by_score(scores)[:60], [device] * 3, FakePeers()
    )
    before, ids = table.rows.clone(), torch.randint(200, (500,))
    table.rows[mine.cached_ids] = 0
    counted = mine.peer_hits(ids)
    for number, first in enumerate(copies):
        other_copies = tuple(each for each in copies if each is not first)
        again = replace(mine, copies=first, other_copies=other_copies, _peer_tally=cache.Tally())
        again.reset_counters()
        assert again.cache_nbytes == first.nbytes == cache.cache_bytes(table, 60, 3)
        assert torch.equal(again.gather(ids.to(device)).cpu(), before[ids])
        own = access_counts.rank_by_score(scores)[number:60:3]
        hits = int(torch.isin(ids, mine.cached_ids).sum())
        peer_hits = hits - int(torch.isin(ids, own).sum())
        assert again.counters() == cache.CacheCounters(500, hits, 120, peer_hits)
        # by bits, and by slots
        assert number > 0 or peer_hits == counted


@pytest.mark.parametrize("world_size", [1, 3])
def test_processes_shard_a_cache(world_size, small):
    graph, seeds = small
    table = table_for(graph)
    options = {"fanouts": [5, 5], "batch_size": 64, "seed": 2}
    counted = gcnzc.presample(graph, seeds, [5, 5], 64, seed=2)
    shares = [
        gcnzc.cached_share(table, 0.1, counted, rank=rank, world_size=world_size, device="cpu")
        for rank in range(world_size)
    ]
    sent = [pickle.loads(pickle.dumps(share.handle)) for share in shares]
    whole = gcnzc.cached(table, 0.1, counted, device="cpu")
    for rank, share in enumerate(shares):
        mine = share.join(sent[::-1])
        assert torch.equal(mine.cached_ids, whole.cached_ids)
        own = access_counts.rank_by_score(counted.scores)[rank : mine.num_cached : world_size]
        assert (mine.hits(own), mine.peer_hits(own)) == (len(own), 0)
        assert mine.predicted_hit_rate == pytest.approx(whole.predicted_hit_rate, rel=1e-12)
        loader = Loader(graph, mine, seeds, **options, rank=rank, world_size=world_size)
        for batch in loader:
            assert torch.equal(batch.x, table.rows[batch.nodes])
        counters = mine.counters()
        assert abs(counters.hit_rate - mine.predicted_hit_rate) < 0.03
        assert abs(counters.own_hit_rate - mine.predicted_own_hit_rate) < 0.03 / world_size
        assert (counters.peer_hits > 0) == (world_size > 1)
    with pytest.raises(ValueError, match="of a cache that is sharded"):
        shares[0].join(sent[1:])
    other = gcnzc.cached_share(table, 0.2, counted, rank=0, world_size=world_size, device="cpu")
    with pytest.raises(ValueError, match="rank 0 caches 12000 of 60000 rows"):
        shares[-1].join([other.handle, *sent[1:]])


@pytest.mark.parametrize("gpus", [2, 8])
def test_hits_are_balanced_over_the_gpus_of_a_sharded_cache(gpus, small):
    graph, seeds = small
    counted = presampling.presample(graph, seeds, [5, 5], 64, batches=20)
    sizes, by_degree = [600, 6000], access_counts.rank_by_score(graph.in_degrees())
    given = by_degree, count_accesses(Loader(graph, None, seeds, [5, 5], 64), 60), sizes
    measured = access_counts.compute_hit_rates(*given)
    for rates, own in (
        (counted.hit_rates(sizes), counted.own_hit_rates(sizes, gpus)),
        (measured, access_counts.compute_own_hit_rates(*given, gpus)),
    ):
        for rate, of_gpus in zip(rates, own, strict=True):
            assert len(of_gpus) == gpus
            assert sum(of_gpus) == pytest.approx(rate, rel=1e-9)
            # no GPU serves many more reads than another
            assert max(of_gpus) - min(of_gpus) < 0.1 * rate / gpus


def test_devices_that_cannot_share_a_cache_are_rejected():
    given = FeatureTable(torch.zeros(10, 2)), 0.5, torch.rand(10)
    for devices in (["cpu", "cuda:0"], ["cuda:1", "cuda:0", "cuda:1"]):
        with pytest.raises(ValueError, match=r"cannot be sharded over \[.*\]"):
            gcnzc.cached(*given, devices=devices)
    with pytest.raises(ValueError, match=r"cannot be sharded over \[.*\]"):
        gcnzc.cached(*given, devices=["cpu", "cpu"], device="cpu")


@pytest.mark.gpu
def test_a_loader_on_a_gpu_uses_the_cache(small, device):
    graph, seeds = small
    table = table_for(graph)
    with pinned(table) as locked:
        mine = gcnzc.cached(locked, 0.05, gcnzc.presample(graph, seeds, [5, 5], 128))
        assert mine.copies.memory.is_cuda
        rows = hits = 0
        for batch in Loader(graph, mine, seeds, [5, 5], 128, device=device):
            nodes = batch.nodes.cpu()
            assert torch.equal(batch.x.cpu(), table.rows[nodes])
            rows, hits = rows + len(nodes), hits + int(torch.isin(nodes, mine.cached_ids).sum())
        assert (mine.counters().rows, mine.counters().hits) == (rows, hits)
        # a gather on the host does not read the copies
        assert torch.equal(mine.gather(nodes), table.rows[nodes])
        assert mine.counters().hits == hits


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_cache_of_sparse_rows_counts_hits_on_the_host():
    dense = torch.randn(50, 8).relu()
    mine = gcnzc.cached(FeatureTable(dense.to_sparse_csr()), 0.5, torch.rand(50), device="cpu")
    assert torch.equal(mine.gather(torch.arange(50)), dense)
    assert mine.counters() == cache.CacheCounters(50, 25, 32)


def test_cache_sizes_are_parsed():
    sizes = {"0.2": 0.2, ".5": 0.5, "1": 1.0, "2GB": 2 * 10**9, "1.5 MiB": 3 * 2**19}
    for words, size in (sizes | {"7B": 7, "3KB": 3000, "1GiB": 2**30}).items():
        found = parse_share(words, "size", "of the rows")
        assert (found, type(found)) == (size, type(size))
    for words in ("0", "1.1", "20", "2G", "GB", "", "-0.1", "0.2.1", "0B", "x", "nan"):
        with pytest.raises(ValueError, match=r"size must be a fraction of the rows.*\n\nhint: "):
            parse_share(words, "size", "of the rows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hot-train")
    make(folder / "raw", "rmat", Shape(3000, 20_000, 12, 4), seed=3)
    gcnzc.prepare(folder / "raw", folder / "graph")
    return folder / "graph"


@pytest.mark.parametrize("cache_policy", ["presampled", "in-degree"])
def test_training_reports_the_hit_rate(cache_policy, folder, tmp_path):
    sizes = {"fanouts": (3, 3), "hidden": 8, "batch_size": 128, "epochs": 2}
    config = TrainConfig(data=folder, **sizes, lr=0.01, device="cpu")
    plain = train(config, tmp_path / "plain")
    cached = config.replace(features=f"cached:size=0.1,policy={cache_policy}")
    line = train(cached, tmp_path / "cached")
    assert line["test_accuracy"] == plain["test_accuracy"]
    assert "hit_rate" not in plain
    evaluated = evaluate(EvaluateConfig(run=tmp_path / "cached", device="cpu"))
    assert evaluated["test_accuracy"] == line["test_accuracy"]
    lines = record.read(tmp_path / "cached" / "record.jsonl")
    assert len(lines) == 2
    # the hot set is known, and the minibatches are those of this seed
    data = gcnzc.load(folder)
    seeds = data.split["train"]
    ranking = data.graph.in_degrees()
    if cache_policy == "presampled":
        counted = presampling.presample(data.graph, seeds, [3, 3], 128)
        ranking = counted.scores
        assert line["predicted_hit_rate"] == counted.hit_rates([300])[0]
        assert abs(line["predicted_hit_rate"] - line["hit_rate"]) < 0.03
    else:
        assert line["predicted_hit_rate"] is None
    loader = Loader(data.graph, None, seeds, [3, 3], 128)
    hits = rows = 0
    for told in lines:
        loader.set_epoch(told["epoch"])
        counts = count_accesses(loader, len(loader))
        mine = int(counts[access_counts.rank_by_score(ranking)[:300]].sum())
        assert told["hit_rate"] == mine / int(counts.sum())
        assert told["bytes_saved"] == mine * 48
        hits, rows = hits + mine, rows + int(counts.sum())
    assert line["hit_rate"] == pytest.approx(hits / rows, rel=1e-12)
    assert line["bytes_saved"] == hits * 48 // 2


def test_the_counters_of_a_resumed_epoch_continue():
    from gcnzc.train.epoch_stats import EpochStats

    tally = EpochStats()
    tally.hits += 5
    state = tally.state_dict()
    other = EpochStats(**state)
    other.hits += 2
    assert other.state_dict()["hits"] == 7
