"""Declare the state of an optimizer once; saving, checks, loading, resizing and size follow.

A method returns a list of fields from `declare`: `Vector`, `Number`, `Option`, `Errors` or `Inner`.
A field names an attribute, and says which ranks have it and what happens to it if their number
changes:

    kind      on W ranks                             with another number of ranks
    shared    equal on all ranks                     unchanged
    local     each rank has its own                  `resize`: "same", rank 0's on all ranks;
                                                     "mean", on all ranks; "drop", the initial value
    sharded   each rank has its shard                sharded again

Compression errors are resized such that the mean error over the ranks does not change. A snapshot
is a dictionary of plain values. It contains the rules of its local fields, so `resize_state` needs
no optimizer.

Notation: W ranks, n elements of the flat vector.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Compression, Reducer, WorkerInfo
from gcnzc.compress.reducer import DAMAGED_HINT
from gcnzc.optim.fully_shard import like, local
from gcnzc.optim.muon import Muon
from gcnzc.optim.resize import GROUPS, RESIZED_FROM, check_state_dict, shard_bounds
from gcnzc.system.arguments import describe

Values = Mapping[str, Any]
Kind = Literal["shared", "local", "sharded"]
Resize = Literal["same", "mean", "drop"]
SECTIONS = {"shared": "shared", "local": "local", "sharded": "shards"}
"""for each kind, the section of a snapshot"""
MAX_COUNT = 2**53
"""the largest number of steps, exchanges or ranks in a state"""
FLOAT_MAX = torch.finfo(torch.float64).max
# the state of a parameter after its first step
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_REQUIRED = {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM}
_MODEL_HINT = "hint: load it into an optimizer of the same model"


class Field:
    """A part of the state: one attribute of the optimizer, or of an object that belongs to it.

    If the object has a `state_prefix`, the name in states begins with it.
    """

    owner: Any
    name: str
    kind: Kind | Callable[[Values], Kind] = "local"
    """a function of the current values if it varies, as for momenta that are equal on all ranks
    only after a synchronization"""
    resize: Resize = "same"

    @property
    def key(self) -> str:
        """The name in states."""
        prefix = getattr(self.owner, "state_prefix", "")
        return f"{prefix} {self.name}" if prefix else self.name

    @property
    def section(self) -> str:
        """The section of a snapshot to which the field belongs now."""
        kind = self.kind(Current(self.owner)) if callable(self.kind) else self.kind
        return SECTIONS[kind]

    def is_dropped(self, values: Values, worker: WorkerInfo) -> bool:
        """Whether a loaded state has no value, because the number of ranks has changed."""
        is_resized = values["saved_world_size"] != worker.world_size
        return self.resize == "drop" and is_resized

    def allocate(self, worker: WorkerInfo) -> None:
        """Set the attribute to its initial value, unless the owner has it already."""
        if not hasattr(self.owner, self.name):
            setattr(self.owner, self.name, self.initial_value(worker))

    def save(self) -> Any:
        """Return the value to save; None to save nothing."""
        return getattr(self.owner, self.name)

    def initial_value(self, worker: WorkerInfo) -> Any:
        """Return the value before the first step; not for what the owner sets itself."""
        raise AttributeError(f"{type(self.owner).__name__} has no {self.name}")

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """Check the value of a state, before anything is loaded; `values` has those of all fields.

        Raises:
            ValueError: it is missing or damaged.
        """

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """Load a checked value, or the initial one if the state has none."""


@dataclass(eq=False)
class Vector(Field):
    """A tensor (size,)."""

    owner: Any
    name: str
    size: int | Callable[[Values], int] | None
    """the number of elements on all ranks together; a function of the values if it depends on them;
    None if it may be any, and is 0 at the start"""
    dtype: torch.dtype | None = None
    """None for that of the flat vector"""
    kind: Kind | Callable[[Values], Kind] = "shared"
    resize: Resize = "same"
    least: float = -math.inf
    """the smallest valid element"""
    is_valid: Callable[[Tensor, Values], bool] | None = None
    """a further check of a loaded tensor; also gets the loaded values"""
    is_optional: bool = False
    """whether the attribute is None at the start, and whenever the method does not use it"""
    may_overflow: bool | Callable[[Values], bool] = False
    """whether elements of a valid state may be infinite or NaN; may be a function of the values"""
    on_host: bool = False
    exists: Callable[[Values], bool] = lambda values: True
    """whether there is a vector, given the values of the state; the attribute is None otherwise"""
    initial: float = 0
    is_computed: bool = False
    """whether the attribute is a property with a setter, which takes no memory of its own"""

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`."""
        if self.is_computed:
            return
        if not self.exists(Current(self.owner)):
            setattr(self.owner, self.name, None)
        elif getattr(self.owner, self.name, None) is None:
            setattr(self.owner, self.name, self.initial_value(worker))

    def shape(self, values: Values, worker: WorkerInfo) -> tuple[int]:
        """Return the shape on this rank."""
        if self.size is None:
            return (values[self.key].numel() if self.key in values else 0,)
        size = self.size(values) if callable(self.size) else self.size
        begin, end = shard_bounds(size, worker.rank, worker.world_size)
        return (end - begin if self.kind == "sharded" else size,)

    def initial_value(self, worker: WorkerInfo) -> Tensor | None:
        """See `Field`."""
        if self.is_optional:
            return None
        device = torch.device("cpu") if self.on_host else worker.device
        shape, dtype = self.shape(Current(self.owner), worker), self.dtype or worker.dtype
        return torch.full(shape, self.initial, dtype=dtype, device=device)

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        if not self.exists(values):
            return
        value, label = values.get(self.key), f"{self.key} of the state"
        if value is None and (self.is_optional or self.is_dropped(values, worker)):
            return
        if not isinstance(value, Tensor):
            raise_damaged(f"{label} {'is missing' if value is None else f'is {describe(value)}'}")
        if value.shape != (shape := self.shape(values, worker)):
            raise_damaged(f"{label} has the shape {tuple(value.shape)}, not {shape}")
        dtype = self.dtype or worker.dtype
        if value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point):
            raise_damaged(f"{label} is {value.dtype}, not {dtype}")
        may_overflow = (
            self.may_overflow(values) if callable(self.may_overflow) else self.may_overflow
        )
        if not may_overflow and not bool(value.isfinite().all()):
            raise_damaged(f"{label} has elements that are not finite")
        if self.least > -math.inf and bool((value < self.least).any()):
            raise_damaged(f"{label} has elements below {self.least:g}")
        if self.is_valid is not None and not self.is_valid(value, values):
            raise_damaged(f"{label} has elements out of range")

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        value = values.get(self.key)
        if value is None:
            value = self.initial_value(worker) if self.exists(values) else None
        else:
            device = "cpu" if self.on_host else worker.device
            value = value.to(device, self.dtype or worker.dtype, copy=True)
        setattr(self.owner, self.name, value)


@dataclass(eq=False)
class Number(Field):
    """A number, a flag, a string, or a list of numbers."""

    owner: Any
    name: str
    initial: Any = 0
    """an int, float, bool, str or list; a saved value must have the same type"""
    kind: Kind | Callable[[Values], Kind] = "shared"
    resize: Resize = "same"
    least: float | Callable[[Values], float] = 0
    """the smallest valid number; may be a function of the loaded values"""
    length: int | None = None
    """the length of a list; None for any"""

    def initial_value(self, worker: WorkerInfo) -> Any:
        """See `Field`."""
        return list(self.initial) if isinstance(self.initial, list) else self.initial

    def save(self) -> Any:
        """See `Field`; lists are copied, since later steps change them."""
        value = super().save()
        return list(value) if isinstance(value, list) else value

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        if self.key not in values:
            if self.is_dropped(values, worker):
                return
            raise_damaged(f"{self.key} of the state is missing")
        value, kind = values[self.key], type(self.initial)
        least = self.least(values) if callable(self.least) else self.least

        def is_number(each: object) -> bool:
            is_real = type(each) is int or (isinstance(each, float) and kind is not int)
            return is_real and least <= each <= (MAX_COUNT if kind is int else FLOAT_MAX)  # type: ignore[operator]

        if kind is list:
            is_valid = isinstance(value, list) and all(map(is_number, value))
            is_valid = is_valid and self.length in (None, len(value))
        else:
            is_valid = is_number(value) if kind in (int, float) else type(value) is kind
        if not is_valid:
            limit = f" of at least {least:g}" if kind in (int, float, list) else ""
            raise_damaged(
                f"{self.key} of the state is {describe(value)}, not a {kind.__name__}{limit}"
            )

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        value = values.get(self.key, self.initial)
        setattr(self.owner, self.name, list(value) if isinstance(value, list) else value)


@dataclass(eq=False)
class Option(Field):
    """Whether the optimizer has an option that its state depends on; a state must have it too."""

    owner: Any
    name: str
    kind: Kind = "shared"

    @property
    def key(self) -> str:
        """See `Field`."""
        return f"with {self.name}"

    def save(self) -> bool:
        """See `Field`."""
        return bool(getattr(self.owner, self.name))

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        if not isinstance(values.get(self.key), bool):
            raise_damaged(f"{self.key} of the state is {describe(values.get(self.key))}")
        if values[self.key] != self.save():
            there, here = ("without", "with") if self.save() else ("with", "without")
            raise ValueError(
                f"the state was saved by {self.owner.name} {there} {self.name}, but this one is "
                f"{here} it\n\nhint: construct it with the options of the run that saved the state"
            )


@dataclass(eq=False)
class Errors(Field):
    """The compression errors of `owner.reducers[name]`, which computes compressed means.

    The reducer is created here, so a method declares a compressed mean in one place.
    """

    owner: Any
    name: str
    compress: Compression
    size: int
    exists: Callable[[Values], bool] = lambda values: True
    """whether there is a reducer, given the values of the state; memory is allocated only then"""
    layers: Sequence[int] | None = None
    """see `WorkerInfo`; None for those of the flat vector"""

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`; also creates a reducer that exists from now on."""
        if self.name not in self.owner.reducers and self.exists(Current(self.owner)):
            self.owner.reducers[self.name] = self.initial_value(worker)

    def save(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the errors by the name of the reducer, if it exists."""
        reducer = self.owner.reducers.get(self.name)
        return {} if reducer is None else {self.name: reducer.errors()}

    def initial_value(self, worker: WorkerInfo) -> Reducer:
        """See `Field`: a new reducer."""
        own = worker if self.layers is None else replace(worker, layers=self.layers)
        return self.compress.reducer(self.size, own)

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        if self.exists(values):
            reducer = self.owner.reducers.get(self.name) or self.initial_value(worker)
            reducer.check_errors(values["errors"].get(self.name, {}))

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.owner.reducers.pop(self.name, None)
        if self.exists(values):
            reducer = self.owner.reducers[self.name] = self.initial_value(worker)
            reducer.load_errors(values["errors"].get(self.name, {}))


@dataclass(eq=False)
class Inner(Field):
    """The state of an optimizer of torch that the owner wraps; see `Optimizer.state_dict`."""

    owner: Any
    name: str = "inner"
    resize: Resize = "mean"

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        inner: Optimizer = getattr(self.owner, self.name)
        return inner

    def save(self) -> dict[str, Any]:
        """See `Field`; of tensors that are sharded, this rank's shards."""
        saved = self.optimizer.state_dict()

        def own(value: Any) -> Any:
            return local(value) if isinstance(value, Tensor) else value

        states = {
            number: {name: own(value) for name, value in values.items()}
            for number, values in saved["state"].items()
        }
        return {**saved, "state": states}

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        check_inner_state(self.optimizer, values.get(self.key, {}))

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.optimizer.load_state_dict(values[self.key])
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = like(value, parameter)


class Current(dict[str, Any]):
    """The current values of an object's attributes by name, for functions of `Values`."""

    def __init__(self, owner: Any) -> None:
        prefix = getattr(owner, "state_prefix", "")
        super().__init__({f"{prefix} {name}".strip(): each for name, each in vars(owner).items()})


class State:
    """The declared state of an optimizer on this rank.

    Args:
        optimizer: the name of the optimizer, which a state must have too.
        fields: see `Field`.
        layout: lines that describe the parameters, which a state must have too.
        worker: the rank, the number of ranks, and the dtype and device of vectors.
    """

    def __init__(
        self, optimizer: str, fields: Sequence[Field], layout: Sequence[str], worker: WorkerInfo
    ) -> None:
        self.optimizer = optimizer
        # whether there is a reducer depends on other values
        self.fields = sorted(fields, key=lambda field: isinstance(field, Errors))
        self.layout, self.worker = list(layout), worker
        keys = [(type(field) is Errors, field.key) for field in self.fields]
        assert len(set(keys)) == len(keys), f"two fields have one name: {keys}"
        self.allocate()

    def allocate(self) -> None:
        """Set the attributes that do not exist yet, and create the reducers that exist now."""
        for field in self.fields:
            field.allocate(self.worker)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank; tensors are not copied."""
        sections: dict[str, dict[str, Any]] = {name: {} for name in [*SECTIONS.values(), "errors"]}
        for field in self.fields:
            if isinstance(field, Errors):
                sections["errors"] |= field.save()
            elif (value := field.save()) is not None:
                sections[field.section][field.key] = value
        return {
            **sections,
            "resize": self.rules,
            "optimizer": self.optimizer,
            "layout": self.layout,
            "rank": self.worker.rank,
            "world_size": self.worker.world_size,
        }

    @property
    def rules(self) -> dict[str, str]:
        """What happens to each field if the number of ranks changes."""
        return {field.key: field.resize for field in self.fields}

    def load(self, snapshot: Mapping[str, Any]) -> None:
        """Load a snapshot of this rank, or a result of `resize_state`.

        Raises:
            ValueError: it is of another rank, other parameters or another optimizer, or is damaged.
                Nothing is loaded then.
        """
        values = self.check(snapshot)
        for field in self.fields:
            field.load(values, self.worker)

    def check(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Check a snapshot, and return its values by the keys of the fields; see `load`."""
        for name in [*SECTIONS.values(), "errors"]:
            if not isinstance(snapshot.get(name), Mapping):
                found = describe(snapshot.get(name))
                raise_damaged(f"{name} of the state is {found}, not a mapping")
        if snapshot.get("optimizer") != self.optimizer:
            raise ValueError(
                f"the state of {snapshot.get('optimizer')}, not of {self.optimizer}\n\nhint: load "
                "it into the type of optimizer that saved it"
            )
        rank, world_size = snapshot.get("rank"), snapshot.get("world_size")
        if (rank, world_size) != (self.worker.rank, self.worker.world_size):
            raise ValueError(
                f"the state of rank {rank} of {world_size} cannot be loaded on rank "
                f"{self.worker.rank} of {self.worker.world_size}\n\nhint: "
                "gcnzc.optim.resize_state converts the states of all ranks for another number of "
                "ranks"
            )
        check_layout(self.layout, snapshot.get("layout"))
        values = {key: value for each in SECTIONS.values() for key, value in snapshot[each].items()}
        values["errors"] = snapshot["errors"]
        values["saved_world_size"] = snapshot.get(RESIZED_FROM, world_size)
        for field in self.fields:
            field.check(values, self.worker)
        if snapshot.get("resize") != self.rules:
            raise_damaged("the rules of the state for another number of ranks differ")
        return values

    @property
    def num_bytes(self) -> int:
        """The memory of the tensors of the state between steps, without the inner optimizer's."""
        found: list[Any] = []
        for field in self.fields:
            if isinstance(field, Errors):
                found += [each for errors in field.save().values() for each in errors.values()]
            elif isinstance(field, Vector) and not field.is_computed:
                found.append(field.save())
        return sum(each.nbytes for each in found if each is not None)


def check_layout(layout: Sequence[str], saved: object) -> None:
    """Check that a state has the same parameters as an optimizer.

    Args:
        layout: a line for each parameter of the optimizer, such as its name and shape.
        saved: those of the state.

    Raises:
        ValueError: a line differs; the message has the first of them.
    """
    if not isinstance(saved, list | tuple):
        raise_damaged(f"layout of the state is {describe(saved)}, not a list")
    for own, other in zip_longest(layout, saved, fillvalue="no more parameters"):
        if own != other:
            raise ValueError(
                f"the state has {other}, but this optimizer has {own}\n\n{_MODEL_HINT}"
            )


def check_group_lengths(groups: Sequence[Mapping[str, Any]], saved: Any) -> None:
    """Check that the parameter groups of a state have as many parameters as those of an optimizer.

    Args:
        groups: the optimizer's `param_groups`.
        saved: those of the state.

    Raises:
        ValueError: they have not.
    """
    check_state_dict({GROUPS: saved})
    own_counts, counts = ([len(group["params"]) for group in each] for each in (groups, saved))
    if own_counts != counts:
        raise ValueError(
            f"the state has groups of {counts} parameters, but this optimizer has groups of "
            f"{own_counts}\n\n{_MODEL_HINT}"
        )


def check_inner_state(inner: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict of an inner optimizer is of the same parameters.

    Shapes are compared if torch implements the optimizer, and for `gcnzc.optim.Muon`. These, except
    Adafactor, have tensors of the parameter's shape, and scalars such as `step`. Others may have
    other tensors.

    Args:
        inner: the inner optimizer.
        state_dict: a result of its `state_dict`.

    Raises:
        ValueError: the numbers of parameters or their shapes differ, or a value is missing or
            damaged.
    """
    check_state_dict(state_dict)
    check_group_lengths(inner.param_groups, state_dict.get(GROUPS))
    states, groups, kind = state_dict.get("state", {}), state_dict[GROUPS], type(inner)
    # torch 2.4 has no Adafactor
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ != "Adafactor"
    is_known |= issubclass(kind, Muon)
    required = _REQUIRED.get(kind, set())
    for number, (group, saved) in enumerate(zip(inner.param_groups, groups, strict=True)):
        pairs = zip(group["params"], saved["params"], strict=True)
        for index, (parameter, saved_index) in enumerate(pairs):
            where, values = f"group {number}, parameter {index}", states.get(saved_index, {})
            if values and (missing := sorted(required.difference(values))):
                raise_damaged(f"the state of {where} has no {', '.join(missing)}")
            for name, value in values.items() if is_known else ():
                is_required = name in required
                _check_inner_value(name, value, where, local(parameter), is_required=is_required)


def _check_inner_value(
    name: str, value: object, where: str, parameter: Tensor, *, is_required: bool
) -> None:
    """Check a value of the state of a parameter; see `check_inner_state`."""
    # such as the momentum of SGD before the first step
    if value is None and not is_required:
        return
    label = f"{name} of {where} of the state is {describe(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise_damaged(label)
    is_scalar = not isinstance(value, Tensor) or value.numel() == 1
    needs_elements = is_required and name != "step"
    shape = value.shape if isinstance(value, Tensor) else torch.Size()
    if isinstance(value, Tensor):
        is_real = value.is_floating_point() or (is_scalar and not value.is_complex())
        if not is_real and not (value.is_complex() and parameter.is_complex()):
            raise_damaged(label)
    if shape != parameter.shape and (needs_elements or not is_scalar):
        raise ValueError(
            f"the state has {name} {tuple(shape)} of {where}, but this optimizer has a parameter "
            f"{tuple(parameter.shape)}\n\n{_MODEL_HINT}"
        )
    if name == "step" and is_scalar and not 0 <= float(value) <= MAX_COUNT:
        raise_damaged(f"step of {where} of the state is {float(value)}")


def raise_damaged(what: str) -> NoReturn:
    """Raise the error of a damaged state."""
    raise ValueError(f"{what}\n\n{DAMAGED_HINT}")
