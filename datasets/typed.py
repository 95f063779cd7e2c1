"""Generate a typed graph with times, for which the best possible accuracy is known.

Users buy and view items, and ask queries. The task is to predict the class of a user from what
happened until the time of its label:

    user    features: x_u = m_c + noise, weakly informative; time of its label t_u; label y_u
    item    features: noise; its class is that of its brand
    query   features: show its class
    brand   features: show its class

    item  -bought_by-> user     edges with times; class c_u with probability a_r, else any class
    item  -viewed_by-> user     likewise
    query -asked_by->  user     likewise
    user  -buys->      item     the reverse edges of bought_by
    brand -makes->     item     an edge at time 0; some items get a second brand later
    user  -met->       user     edges at random, which contain no information

Each user `u` has a class `c_u`, chosen uniformly from K classes, and a time of its label `t_u`. The
label `y_u` is `c_u`, or, with probability `noise`, another class, each with equal probability. Each
edge to a user is earlier than `t_u` with probability `PAST`. The edges of relation `r` before `t_u`
come from a source of class `c_u` with probability `a_r`, and otherwise from a source of any class.
**All edges after `t_u` come from sources of class `y_u`**, and the second brands appear after the
last label: a loader that samples later edges is found by an accuracy above the best one.

**The best possible accuracy** is that of an oracle on the test users, as that of `planted` in
`gcnzc.datasets.generated`. The oracle knows the parameters and the classes of items and queries.
Given these, edges that do not touch `u` contain no information about `c_u`, and the times of its
edges neither, so that the log posterior of class `k` is, up to a constant,

    x_u . m_k - |m_k|^2 / 2 + sum over r, edges e of r before t_u of
                              log(1 + a_r K [class of e's source = k] / (1 - a_r))

The splits are by time: training users have the earliest labels, test users the latest.

Notation: K classes, D features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.generated import CHUNK_EDGES, Chunks, generate_rows, random_stream
from gcnzc.datasets.rows import Array, Progress, Rows, allocate_in_memory, no_progress
from gcnzc.datasets.source import EdgeType, HeteroArrays, node_dtype

# fractions of the nodes, by type
NODE_SHARES = {"user": 0.5, "item": 0.3, "query": 0.15, "brand": 0.05}
BOUGHT: EdgeType = ("item", "bought_by", "user")
VIEWED: EdgeType = ("item", "viewed_by", "user")
ASKED: EdgeType = ("query", "asked_by", "user")
BUYS: EdgeType = ("user", "buys", "item")
MAKES: EdgeType = ("brand", "makes", "item")
MET: EdgeType = ("user", "met", "user")
# fractions of the edges that are left after those of MAKES, and the strength of their signal
EDGE_SHARES = {BOUGHT: 0.25, VIEWED: 0.25, ASKED: 0.1}
STRENGTHS = {BOUGHT: 1.0, VIEWED: 0.5, ASKED: 0.7}
# largest affinity: with 1, one edge of another class would exclude a class
LARGEST_AFFINITY = 0.9
PAST = 0.7  # share of the edges of a user that are earlier than its label
SECOND_BRANDS = 0.25  # share of the items that get a second brand
# times are seconds: labels are in the second half of a year, and edges in one and a half years
YEAR = 365 * 86400
SPLIT_SHARES = {"train": 0.6, "valid": 0.2, "test": 0.2}
# standard deviation of the noise of features that show a class
CLARITY = 0.1
_CHUNK_NODES = 1 << 18
# purposes of random streams, which follow those of `gcnzc.datasets.generated`
_MEANS, _CLASSES, _TIMES, _LABELS, _BRANDS, _MAKES, _MET = range(100, 107)
_FEATURES = {"user": 110, "item": 111, "query": 112, "brand": 113}
_EDGES = {BOUGHT: 120, VIEWED: 121, ASKED: 122}


@dataclass(frozen=True)
class TypedModel:
    """The model's parameters, and the classes of all nodes."""

    sizes: dict[str, int]  # numbers of nodes
    counts: dict[EdgeType, int]  # numbers of edges
    seed: int
    num_classes: int
    means: Array  # (K, D) float32
    separation: float  # of the features of users
    classes: dict[str, Array]  # (N,) by node type
    members: dict[str, tuple[Array, Array]]  # of items and queries: ids by class, and (K + 1,) ends
    label_time: Array  # (users,)
    labels: Array  # (users,)
    affinity: dict[EdgeType, float]


def typed(
    num_nodes: int,
    num_edges: int,
    num_features: int = 16,
    num_classes: int = 8,
    *,
    seed: int = 0,
    noise: float = 0.05,
    separation: float = 1.0,
    strength: float = 1.0,
    name: str = "typed",
    threads: int | None = None,
    progress: Progress = no_progress,
) -> HeteroArrays:
    """Generate a typed graph with times, from the model in the module's docstring.

    Args:
        num_nodes: nodes of all four types together.
        num_edges: edges of all six types together.
        num_features: D, of each type.
        num_classes: K, at least 2.
        seed: of all random choices; the result does not depend on the number of threads.
        noise: share of the labels that differ from the class of the user.
        separation: length of the mean features of users of a class, in standard deviations.
        strength: factor of the affinities `a_r`, which decrease with the number of edges so that
            the best accuracy is similar for all sizes.
        name: of the dataset.
        threads: number of threads; None uses all cores.
        progress: called with numbers of edges.

    Raises:
        ValueError: an argument is out of range.
    """
    model = draw_model(
        num_nodes, num_edges, num_features, num_classes, seed, noise, separation, strength
    )
    sizes = model.sizes
    edges: dict[EdgeType, tuple[Array, Array]] = {}
    times: dict[EdgeType, Array] = {}
    for each in EDGE_SHARES:
        *ends, time = _collect(_edges_to_users(model, each, threads), sizes, each, progress)
        edges[each], times[each] = (ends[0], ends[1]), time
    edges[BUYS], times[BUYS] = edges[BOUGHT][::-1], times[BOUGHT]
    edges[MAKES], times[MAKES] = _makes(model)
    *ends, time = _collect(_random_edges(model, threads), sizes, MET, progress)
    edges[MET], times[MET] = (ends[0], ends[1]), time
    split = _split_by_time(model.label_time)
    features = {each: _features(model, each, name, threads) for each in sizes}
    scores = log_posterior(model, edges, times, split["test"], features["user"])
    right = scores.argmax(axis=1) == model.labels[split["test"]]
    return HeteroArrays(
        name,
        sizes,
        {each: edges[each] for each in (BOUGHT, VIEWED, ASKED, BUYS, MAKES, MET)},
        node_features=features,
        labels={"user": model.labels.astype(np.int64)},
        split={part: {"user": ids} for part, ids in split.items()},
        node_time={"user": model.label_time},
        edge_time={each: times[each] for each in (BOUGHT, VIEWED, ASKED, BUYS, MAKES, MET)},
        num_classes=num_classes,
        split_name="time",
        best_accuracy=float(right.mean()),
        origin={
            "generator": "typed",
            "seed": seed,
            "noise": noise,
            "separation": separation,
            "strength": strength,
        },
    )


def _sizes(num_nodes: int, num_classes: int) -> dict[str, int]:
    """Return the number of nodes of each type."""
    sizes = {each: round(share * num_nodes) for each, share in NODE_SHARES.items()}
    sizes["user"] += num_nodes - sum(sizes.values())
    if num_classes < 2 or sizes["brand"] < num_classes:
        raise ValueError(
            f"{num_classes} classes for {num_nodes} nodes, of which {sizes['brand']} are brands\n\n"
            "hint: use 2 or more classes, and at least 20 nodes for each class"
        )
    return sizes


def _edge_counts(num_edges: int, sizes: dict[str, int]) -> dict[EdgeType, int]:
    """Return the number of edges of each type but BUYS, which has as many as BOUGHT."""
    makes = sizes["item"] + _num_second(sizes)
    left = num_edges - makes
    counts = {each: int(share * left) for each, share in EDGE_SHARES.items()}
    if min(counts.values()) < 1:
        raise ValueError(
            f"{num_edges} edges for {sum(sizes.values())} nodes\n\n"
            f"hint: use at least {makes + 10}; items and their brands have {makes} edges"
        )
    counts[MET] = left - sum(counts.values()) - counts[BOUGHT]
    return counts


def _num_second(sizes: dict[str, int]) -> int:
    return int(SECOND_BRANDS * sizes["item"])


def draw_model(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    seed: int,
    noise: float,
    separation: float,
    strength: float,
) -> TypedModel:
    """Draw the classes of all nodes, and the times and labels of users; see `typed`."""
    sizes = _sizes(num_nodes, num_classes)
    counts = _edge_counts(num_edges, sizes)
    if num_features < 1 or seed < 0 or not (separation >= 0 and strength >= 0):
        raise ValueError(
            f"num_features is {num_features}, seed {seed}, separation {separation} and strength "
            f"{strength}\n\nhint: at least 1 feature; the others are at least 0"
        )
    if not 0 <= noise < 1 - 1 / num_classes:
        raise ValueError(
            f"noise is {noise}\n\nhint: use 0 or more, and less than {1 - 1 / num_classes:.3g}"
        )
    means = random_stream(seed, _MEANS).standard_normal((num_classes, num_features))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    classes = {}
    for number, each in enumerate(("user", "brand", "query")):
        chosen = random_stream(seed, _CLASSES, number).integers(num_classes, size=sizes[each])
        if each != "user":
            # every class has a source
            chosen[:num_classes] = np.arange(num_classes)
        classes[each] = chosen
    brand = first_brands(seed, sizes)
    classes["item"] = classes["brand"][brand]
    members = {}
    for each in ("item", "query"):
        order = np.argsort(classes[each], kind="stable")
        ends = np.searchsorted(classes[each][order], np.arange(num_classes + 1))
        members[each] = order, ends
    random = random_stream(seed, _TIMES)
    label_time = random.integers(YEAR // 2, YEAR, size=sizes["user"])
    random = random_stream(seed, _LABELS)
    step = 1 + random.integers(num_classes - 1, size=sizes["user"])
    is_wrong = random.random(sizes["user"]) < noise
    labels = np.where(is_wrong, (classes["user"] + step) % num_classes, classes["user"])
    affinity = {}
    for relation, share in STRENGTHS.items():
        degree = max(1.0, PAST * counts[relation] / sizes["user"])
        affinity[relation] = min(LARGEST_AFFINITY, strength * share / degree**0.5)
    return TypedModel(
        sizes,
        counts,
        seed,
        num_classes,
        means.astype(np.float32),
        separation,
        classes,
        members,
        label_time,
        labels,
        affinity,
    )


def first_brands(seed: int, sizes: dict[str, int]) -> Array:
    """Return the brand of each item at time 0; every class has an item."""
    brand = random_stream(seed, _BRANDS).integers(sizes["brand"], size=sizes["item"])
    shared = min(sizes["brand"], sizes["item"])
    brand[:shared] = np.arange(shared)
    return brand


def _makes(model: TypedModel) -> tuple[tuple[Array, Array], Array]:
    sizes = model.sizes
    random = random_stream(model.seed, _MAKES)
    number = _num_second(sizes)
    items = np.arange(sizes["item"])
    later = random.permutation(sizes["item"])[:number]
    brand = np.concatenate(
        [first_brands(model.seed, sizes), random.integers(sizes["brand"], size=number)]
    )
    time = np.concatenate(
        [np.zeros(len(items), np.int64), random.integers(YEAR + 1, 3 * YEAR // 2, size=number)]
    )
    return _as_ids(brand, np.concatenate([items, later]), sizes["brand"], sizes["item"]), time


def _as_ids(src: Array, dst: Array, num_src: int, num_dst: int) -> tuple[Array, Array]:
    return src.astype(node_dtype(num_src)), dst.astype(node_dtype(num_dst))


def _edges_to_users(model: TypedModel, edge_type: EdgeType, threads: int | None) -> Chunks[Array]:
    """Return (3, n) chunks of the sources, users and times of an informative relation."""
    order, ends = model.members[edge_type[0]]
    affinity = model.affinity[edge_type]
    users, num_classes = len(model.labels), model.num_classes

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random, size = random_stream(model.seed, _EDGES[edge_type], chunk), end - begin
        out = np.empty((3, size), np.int64)
        user = random.integers(users, size=size)
        limit = model.label_time[user]
        is_past = random.random(size) < PAST
        span = np.where(is_past, limit, 3 * YEAR // 2 - limit)
        # in [1, limit] or in (limit, 1.5 years]
        time = 1 + (random.random(size) * span).astype(np.int64) + np.where(is_past, 0, limit)
        is_same = random.random(size) < affinity
        wanted = np.where(is_same, model.classes["user"][user], -1)
        wanted = np.where(is_past, wanted, model.labels[user])
        any_class = random.integers(num_classes, size=size)
        wanted = np.where(wanted < 0, any_class, wanted)
        lengths = ends[wanted + 1] - ends[wanted]
        place = ends[wanted] + (random.random(size) * lengths).astype(np.int64)
        out[0], out[1], out[2] = order[place], user, time
        return out

    return Chunks(make_chunk, model.counts[edge_type], CHUNK_EDGES, threads)


def _random_edges(model: TypedModel, threads: int | None) -> Chunks[Array]:
    """Return (3, n) chunks of edges between users, independent of classes and labels."""
    users = len(model.labels)

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random = random_stream(model.seed, _MET, chunk)
        out = random.integers(users, size=(3, end - begin))
        out[2] = random.integers(1, 3 * YEAR // 2, size=end - begin)
        return out

    return Chunks(make_chunk, model.counts[MET], CHUNK_EDGES, threads)


def _collect(
    chunks: Chunks[Array], sizes: dict[str, int], edge_type: EdgeType, progress: Progress
) -> tuple[Array, Array, Array]:
    dtype = node_dtype(max(sizes.values()))
    src, dst = np.empty(chunks.total, dtype), np.empty(chunks.total, dtype)
    time = np.empty(chunks.total, np.int64)
    done = 0
    for chunk in chunks():
        part = slice(done, done + chunk.shape[1])
        src[part], dst[part], time[part] = chunk
        done = part.stop
        progress(f"edges {edge_type[1]}", done, chunks.total)
    return src, dst, time


def _features(model: TypedModel, node_type: str, name: str, threads: int | None) -> Rows:
    classes = model.classes[node_type]

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random = random_stream(model.seed, _FEATURES[node_type], chunk)
        rows = random.standard_normal((end - begin, model.means.shape[1]), np.float32)
        if node_type == "user":
            rows += np.float32(model.separation) * model.means[classes[begin:end]]
        elif node_type != "item":
            rows *= np.float32(CLARITY)
            rows += model.means[classes[begin:end]]
        return rows

    return generate_rows(
        make_chunk, len(classes), model.means.shape[1], f"{name}'s features of {node_type}", threads
    )


def _split_by_time(label_time: Array) -> dict[str, Array]:
    """Return the ids of users with the earliest, later and latest labels, each ascending."""
    order = np.argsort(label_time, kind="stable")
    ends = np.round(np.cumsum(list(SPLIT_SHARES.values())) * len(order)).astype(np.int64)
    pieces = np.split(order[: ends[-1]], ends[:-1])
    return {part: np.sort(ids) for part, ids in zip(SPLIT_SHARES, pieces, strict=True)}


def log_posterior(
    model: TypedModel,
    edges: dict[EdgeType, tuple[Array, Array]],
    times: dict[EdgeType, Array],
    users: Array,
    features: Rows,
) -> Array:
    """Compute the log posterior of the class of each user; see the module's docstring.

    Args:
        model: the classes and parameters.
        edges: of all types.
        times: of all types.
        users: (S,) ids, ascending.
        features: of all users.

    Returns:
        (S, K) float64; each row lacks a constant term.
    """
    place = np.full(len(model.labels), -1)
    place[users] = np.arange(len(users))
    scores = np.zeros((len(users), model.num_classes))
    for each, affinity in model.affinity.items():
        (src, dst), time = edges[each], times[each]
        counted = np.flatnonzero((place[dst] >= 0) & (time <= model.label_time[dst]))
        cells = place[dst[counted]] * model.num_classes
        cells += model.classes[each[0]][src[counted]]
        counts = np.bincount(cells, minlength=scores.size).reshape(scores.shape)
        scores += counts * np.log1p(affinity * model.num_classes / (1 - affinity))
    means = model.separation * model.means.astype(np.float64)
    scores -= (means**2).sum(axis=1) / 2
    for begin, rows in _numbered(features.chunks(allocate_in_memory)):
        first, last = np.searchsorted(users, [begin, begin + len(rows)])
        scores[first:last] += rows[users[first:last] - begin] @ means.T
    return scores


def _numbered(chunks: Iterator[Array]) -> Iterator[tuple[int, Array]]:
    """Yield chunks of rows with the number of their first row."""
    begin = 0
    for rows in chunks:
        yield begin, rows
        begin += len(rows)
