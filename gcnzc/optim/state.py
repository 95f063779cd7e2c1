"""Declare the state of an optimizer once; saving, checks, loading, resizing and size follow.

A class declares each part of its state as an attribute, `vector` or `scalar`:

    class DiLoCo(LocalMethod):
        anchor: Tensor = vector()
        num_rounds: int = scalar()

What depends on an instance is in `declare`, such as `Errors` of compression and the state of an
`Inner` optimizer. A field says which ranks have it, and what happens to it if their number changes:

    kind      on W ranks                             with another number of ranks
    shared    equal on all ranks                     unchanged
    local     each rank has its own                  `resize`: "same", rank 0's on all ranks;
                                                     "mean", on all ranks; "drop", the initial value
    sharded   each rank has its shard                sharded again

Compression errors are resized such that the mean error over the ranks does not change. A snapshot
is a dictionary of plain values. It contains the rules of all its fields, so `resize_state` needs no
optimizer.

Arguments of a field that depend on the optimizer are functions of it. To load a state, they get a
`View`, which has the values of the state; so a field follows those on which it depends.

Notation: W ranks, n elements of the flat vector.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Compression, Reducer, WorkerInfo
from gcnzc.optim.fully_shard import like, local
from gcnzc.optim.resize import GROUPS, check_state_dict, shard_bounds
from gcnzc.system.arguments import describe

Kind = Literal["shared", "local", "sharded"]
Resize = Literal["same", "mean", "drop"]
SECTIONS = {"shared": "shared", "local": "local", "sharded": "shards"}
"""for each kind, the section of a snapshot"""
OWN: dict[str, Any] = {"kind": "local", "resize": "mean"}
"""arguments of a field whose values differ between ranks; it becomes their mean with another number
of ranks"""
_MODEL_HINT = (
    "hint: load it into an optimizer of the same model, with the same options and `requires_grad`"
)


def always(own: Any) -> bool:
    """Return True, for a field that all optimizers of a class have."""
    return True


def resolve(value: Any, own: Any) -> Any:
    """Return an argument of a field, or the result of the function of the optimizer that it is."""
    return value(own) if callable(value) else value


@dataclass(eq=False, kw_only=True)
class Field:
    """A part of the state: one attribute of the optimizer, or of an object that belongs to it.

    If the object has a `state_prefix`, the name in states begins with it.
    """

    owner: Any = None
    """the object; None in the class that declares the field"""
    name: str = ""
    kind: Kind | Callable[[Any], Kind] = "shared"
    """a function if it varies, as for momenta that are equal on all ranks only after a
    synchronization"""
    resize: Resize = "same"
    when: Callable[[Any], bool] = always
    """whether an optimizer has the field, by its options"""

    @property
    def key(self) -> str:
        """The name in states."""
        prefix = getattr(self.owner, "state_prefix", "")
        return f"{prefix} {self.name}" if prefix else self.name

    def allocate(self, worker: WorkerInfo) -> None:
        """Set the attribute to its initial value, unless the owner has it already."""
        if isinstance(getattr(self.owner, self.name, self), Field):
            setattr(self.owner, self.name, self.initial_value(worker))

    def initial_value(self, worker: WorkerInfo) -> Any:
        """Return the value before the first step."""

    def save(self) -> Any:
        """Return the value to save; None to save nothing."""
        return getattr(self.owner, self.name)

    def read(self, saved: Mapping[str, Any], own: "View", worker: WorkerInfo) -> Any:
        """Return the value of a state, before anything is loaded.

        Args:
            saved: the values of the state by the keys of the fields.
            own: the owner with the values that were read already.
            worker: this rank.

        Raises:
            ValueError: it is missing, or of another model.
        """
        if self.key in saved:
            return saved[self.key]
        if self.resize != "drop":
            raise_damaged(f"{self.key} of the state is missing")
        return self.initial_value(worker)

    def load(self, value: Any, worker: WorkerInfo) -> None:
        """Set the attribute to a copy of a result of `read`."""
        setattr(self.owner, self.name, copy(value))


@dataclass(eq=False, kw_only=True)
class Vector(Field):
    """A tensor (size,); see `vector`."""

    size: int | Callable[[Any], int] | None = lambda own: own.flat.num_elements
    dtype: torch.dtype | None = None
    exists: Callable[[Any], bool] = always
    is_optional: bool = False
    on_host: bool | Callable[[Any], bool] = False
    initial: float = 0
    is_computed: bool = False

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`."""
        if self.is_computed:
            return
        if not self.exists(self.owner):
            setattr(self.owner, self.name, None)
        elif vars(self.owner).get(self.name) is None:
            setattr(self.owner, self.name, self.initial_value(worker))

    def shape(self, own: Any, worker: WorkerInfo) -> tuple[int]:
        """Return the shape on this rank."""
        size = resolve(self.size, own) or 0
        begin, end = shard_bounds(size, worker.rank, worker.world_size)
        return (end - begin if resolve(self.kind, own) == "sharded" else size,)

    def initial_value(self, worker: WorkerInfo) -> Tensor | None:
        """See `Field`."""
        if self.is_optional:
            return None
        device = "cpu" if resolve(self.on_host, self.owner) else worker.device
        dtype = self.dtype or worker.dtype
        return torch.full(self.shape(self.owner, worker), self.initial, dtype=dtype, device=device)

    def read(self, saved: Mapping[str, Any], own: "View", worker: WorkerInfo) -> Tensor | None:
        """See `Field`."""
        if not self.exists(own) or (self.is_optional and self.key not in saved):
            return None
        value: Tensor = super().read(saved, own, worker)
        if not isinstance(value, Tensor):
            raise_damaged(f"{self.key} of the state is {describe(value)}, not a tensor")
        if self.size is not None and value.shape != (shape := self.shape(own, worker)):
            found = tuple(value.shape)
            raise_damaged(f"{self.key} of the state has the shape {found}, not {shape}")
        return value

    def load(self, value: Tensor | None, worker: WorkerInfo) -> None:
        """See `Field`."""
        if value is not None:
            device = "cpu" if resolve(self.on_host, self.owner) else worker.device
            value = value.to(device, self.dtype or worker.dtype, copy=True)
        setattr(self.owner, self.name, value)


@dataclass(eq=False, kw_only=True)
class Scalar(Field):
    """A number, a flag, a string, or a list of numbers; see `scalar`."""

    initial: Any = 0

    def initial_value(self, worker: WorkerInfo) -> Any:
        """See `Field`."""
        return copy(resolve(self.initial, self.owner))

    def save(self) -> Any:
        """See `Field`; a list is copied, since later steps change it."""
        return copy(super().save())


@dataclass(eq=False, kw_only=True)
class Errors(Field):
    """The compression errors of `owner.reducers[name]`, which computes compressed means.

    The reducer is created here, so a method declares a compressed mean in one place.
    """

    compress: Compression
    size: int
    exists: Callable[[Any], bool] = always
    """whether there is a reducer; memory is allocated only then"""
    layers: Sequence[int] | None = None
    """see `WorkerInfo`; None for those of the flat vector"""

    @property
    def key(self) -> str:
        """See `Field`."""
        return f"errors of {self.name}"

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`; also creates a reducer that exists from now on."""
        if self.name not in self.owner.reducers and self.exists(self.owner):
            self.owner.reducers[self.name] = self.initial_value(worker)

    def save(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the errors by the name of the reducer, if it exists."""
        reducer = self.owner.reducers.get(self.name)
        return {} if reducer is None else {self.name: reducer.errors()}

    def initial_value(self, worker: WorkerInfo) -> Reducer:
        """See `Field`: a new reducer."""
        own = worker if self.layers is None else replace(worker, layers=self.layers)
        return self.compress.reducer(self.size, own)

    def read(self, saved: Mapping[str, Any], own: "View", worker: WorkerInfo) -> Any:
        """See `Field`; None if there is no reducer."""
        if not self.exists(own):
            return None
        errors = saved["errors"].get(self.name, {})
        reducer = self.owner.reducers.get(self.name) or self.initial_value(worker)
        reducer.check_errors(errors)
        return errors

    def load(self, value: Any, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.owner.reducers.pop(self.name, None)
        if value is not None:
            reducer = self.owner.reducers[self.name] = self.initial_value(worker)
            reducer.load_errors(value)


@dataclass(eq=False, kw_only=True)
class Inner(Field):
    """The state of an optimizer of torch that the owner wraps; see `Optimizer.state_dict`."""

    name: str = "inner"
    kind: Kind | Callable[[Any], Kind] = "local"
    resize: Resize = "mean"

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        inner: Optimizer = getattr(self.owner, self.name)
        return inner

    def save(self) -> dict[str, Any]:
        """See `Field`; of tensors that are sharded, this rank's shards."""
        saved = self.optimizer.state_dict()
        states = {
            number: {name: local(value) for name, value in values.items()}
            for number, values in saved["state"].items()
        }
        return {**saved, "state": states}

    def read(self, saved: Mapping[str, Any], own: "View", worker: WorkerInfo) -> Any:
        """See `Field`."""
        value = super().read(saved, own, worker)
        check_inner_state(self.optimizer, value)
        return value

    def load(self, value: Any, worker: WorkerInfo) -> None:
        """See `Field`; torch's optimizers do not copy tensors."""
        self.optimizer.load_state_dict(deepcopy(value))
        for parameter, state in self.optimizer.state.items():
            for name, each in state.items():
                if isinstance(each, Tensor):
                    state[name] = like(each, parameter)


def vector(
    size: int | Callable[[Any], int] | None = Vector.size,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Declare a tensor (size,) of the state; assign the result to an attribute of the class.

    Args:
        size: the number of elements on all ranks together, by default n; None if it may be any, and
            is 0 at the start.
        dtype: None for that of the flat vector.
        options: `kind`, "shared" by default, and `resize`, as described above, and

            - `when`: whether an optimizer has the field, by its options,
            - `exists`: whether there is a vector now; the attribute is None otherwise,
            - `is_optional`: whether the attribute is None at the start, and whenever the method
              does not use it,
            - `initial`: the initial value of the elements, 0 by default,
            - `on_host`: whether it is in host memory,
            - `is_computed`: whether the attribute is a property with a setter, which takes no
              memory of its own.

            `when`, `exists` and `on_host` are functions of the optimizer, as `size` may be.
    """
    return Vector(size=size, dtype=dtype, **options)


def scalar(initial: Any = 0, **options: Any) -> Any:
    """Declare a number, a flag, a string or a list of numbers of the state.

    Args:
        initial: the value at the start, or a function of the optimizer.
        options: `kind`, `resize` and `when`; see `vector`.
    """
    return Scalar(initial=initial, **options)


def declared_fields(owner: Any) -> list[Field]:
    """Return the fields that the classes of an object declare; those of its bases first.

    Attributes for which the object has no field are None.
    """
    found: dict[str, Any] = {}
    for kind in reversed(type(owner).__mro__):
        found.update(vars(kind))
    fields = {name: each for name, each in found.items() if isinstance(each, Field)}
    for name, each in fields.items():
        if not each.when(owner) and getattr(owner, name) is each:
            setattr(owner, name, None)
    return [
        replace(each, owner=owner, name=name) for name, each in fields.items() if each.when(owner)
    ]


class View:
    """An object with the values of a state in place of its own, for functions of the optimizer."""

    def __init__(self, owner: Any, values: Mapping[str, Any]) -> None:
        self._owner, self._values = owner, values

    def __getattr__(self, name: str) -> Any:
        key = Field(owner=self._owner, name=name).key
        return self._values[key] if key in self._values else getattr(self._owner, name)


class State:
    """The declared state of an optimizer on this rank.

    Args:
        optimizer: the name of the optimizer, which a state must have too.
        fields: see `Field`.
        layout: lines that describe the options on which the state depends, and the parameters,
            which a state must have too.
        worker: the rank, the number of ranks, and the dtype and device of vectors.
    """

    def __init__(
        self, optimizer: str, fields: Sequence[Field], layout: Sequence[str], worker: WorkerInfo
    ) -> None:
        self.optimizer = optimizer
        # whether there is a vector or a reducer depends on numbers and vectors
        order = (Errors, Vector, Field)
        kinds = [next(kind for kind in order if isinstance(field, kind)) for field in fields]
        self.fields = [
            field
            for kind in reversed(order)
            for own, field in zip(kinds, fields, strict=True)
            if own is kind
        ]
        self.layout, self.worker = list(layout), worker
        assert len(self.rules) == len(fields), f"two fields have one name: {fields}"
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
                sections[SECTIONS[resolve(field.kind, field.owner)]][field.key] = value
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
            ValueError: it is of another rank, other parameters or another optimizer, or incomplete.
                Nothing is loaded then.
        """
        self._check_origin(snapshot)
        saved = {key: value for each in SECTIONS.values() for key, value in snapshot[each].items()}
        unknown = saved.keys() - self.rules.keys()
        saved["errors"] = snapshot["errors"]
        values: dict[str, Any] = {}
        for field in self.fields:
            values[field.key] = field.read(saved, View(field.owner, values), self.worker)
        if unknown:
            raise_damaged(
                f"the state has {', '.join(sorted(unknown))}, which this optimizer has not"
            )
        for field in self.fields:
            field.load(values[field.key], self.worker)

    def _check_origin(self, snapshot: Mapping[str, Any]) -> None:
        """Check that a snapshot is of this optimizer, rank and model; see `load`."""
        if snapshot["optimizer"] != self.optimizer:
            raise ValueError(
                f"the state of {snapshot['optimizer']}, not of {self.optimizer}\n\nhint: load it "
                "into the type of optimizer that saved it"
            )
        rank, world_size = snapshot["rank"], snapshot["world_size"]
        if (rank, world_size) != (self.worker.rank, self.worker.world_size):
            raise ValueError(
                f"the state of rank {rank} of {world_size} cannot be loaded on rank "
                f"{self.worker.rank} of {self.worker.world_size}\n\nhint: "
                "gcnzc.optim.resize_state converts the states of all ranks for another number of "
                "ranks"
            )
        lines = zip_longest(self.layout, snapshot["layout"], fillvalue="no more parameters")
        for own, other in lines:
            if own != other:
                raise ValueError(
                    f"the state has {other}, but this optimizer has {own}\n\n{_MODEL_HINT}"
                )

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


def check_group_lengths(groups: Sequence[Mapping[str, Any]], saved: Any) -> None:
    """Check that the parameter groups of a state have as many parameters as those of an optimizer.

    Args:
        groups: the optimizer's `param_groups`.
        saved: those of the state.

    Raises:
        ValueError: they have not.
    """
    own_counts, counts = ([len(group["params"]) for group in each] for each in (groups, saved))
    if own_counts != counts:
        raise ValueError(
            f"the state has groups of {counts} parameters, but this optimizer has groups of "
            f"{own_counts}\n\n{_MODEL_HINT}"
        )


def check_inner_state(inner: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict of an inner optimizer is of the same parameters.

    The shapes of tensors are compared if torch or gcnzc implements the optimizer. These, except
    Adafactor, have tensors of the parameter's shape, and scalars such as `step`. Others may have
    other tensors.

    Args:
        inner: the inner optimizer.
        state_dict: a result of its `state_dict`.

    Raises:
        ValueError: the numbers of parameters or their shapes differ.
    """
    check_state_dict(state_dict)
    groups, kind = state_dict[GROUPS], type(inner)
    check_group_lengths(inner.param_groups, groups)
    if kind.__name__ == "Adafactor" or not kind.__module__.startswith(("torch.", "gcnzc.")):
        return
    parameters = [each for group in inner.param_groups for each in group["params"]]
    numbers = [each for group in groups for each in group["params"]]
    for index, (parameter, saved) in enumerate(zip(parameters, numbers, strict=True)):
        shape = local(parameter).shape
        for name, value in state_dict["state"].get(saved, {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != shape:
                raise ValueError(
                    f"the state has {name} {tuple(value.shape)} of parameter {index}, but this "
                    f"optimizer has a parameter {tuple(shape)}\n\n{_MODEL_HINT}"
                )


def raise_damaged(what: str) -> NoReturn:
    """Raise the error of a damaged state."""
    raise ValueError(
        f"{what}\n\nhint: load it into an optimizer with the options of the run that saved it, or "
        "load another checkpoint; this one may be damaged"
    )
