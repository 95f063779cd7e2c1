"""Modules and names that changed after 0.1: the old ones warn, and work until 0.3."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# an old module, and where its names are now
MOVED: dict[str, Sequence[str]] = {
    "gcnzc.data": (
        "gcnzc.graph.load",
        "gcnzc.graph.prepare",
        "gcnzc.graph.dataset",
        "gcnzc.graph.stored_features",
    ),
    "gcnzc.decoders": ("gcnzc.models.link",),
    "gcnzc.edge_split": ("gcnzc.graph.edge_split",),
    "gcnzc.hot": (
        "gcnzc.features.cache",
        "gcnzc.features.cache_counters",
        "gcnzc.features.access_counts",
        "gcnzc.loader.presampling",
        "gcnzc.tune.cache_forecast",
    ),
    "gcnzc.kernels.attend": ("gcnzc.kernels.aggregate.gat",),
    "gcnzc.kernels.gather_gpu": ("gcnzc.kernels.gather.gpu",),
    "gcnzc.kernels.quantize": ("gcnzc.kernels.gather.quantize",),
    "gcnzc.layers": ("gcnzc.models.layers",),
    "gcnzc.layerwise": ("gcnzc.train.inference",),
    "gcnzc.metrics": ("gcnzc.models.metrics",),
    "gcnzc.pairs": ("gcnzc.sampling.link",),
    "gcnzc.plan": ("gcnzc.tune.profiles",),
    "gcnzc.record": ("gcnzc.train.record", "gcnzc.system.files", "gcnzc.system.machine"),
    "gcnzc.replicas": ("gcnzc.exchange.sync",),
    "gcnzc.sampler": ("gcnzc.sampling.neighbor", "gcnzc.sampling.batch"),
    "gcnzc.table": (
        "gcnzc.features.table",
        "gcnzc.features.pinning",
        "gcnzc.features.registrations",
    ),
    "gcnzc.wire": ("gcnzc.features.pcie_traffic",),
}


def renamed(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, with which the old names of its attributes work.

    Args:
        package: the package's `__name__`.
        names: old names, and the present ones.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(
            f"{package}.{name} is now {package}.{names[name]}; the old name will be removed in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[package], names[name])

    return get


def renamed_attribute(old: str, new: str) -> Any:
    """Return a property with which the old name of an instance's attribute or method works.

    Args:
        old: the old name, under which the property is assigned in the class.
        new: the present name.
    """

    def get(self: object) -> Any:
        name = type(self).__name__
        warnings.warn(
            f"{name}.{old} is now {name}.{new}; the old name will be removed in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return property(get)


def renamed_arguments(
    names: Mapping[str, str],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function, with which the old names of its arguments work.

    Args:
        names: old names of keyword arguments, and the present ones.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            present = {names.get(name, name): value for name, value in kwargs.items()}
            if len(present) < len(kwargs):
                raise TypeError(
                    f"{function.__qualname__} was given the same argument by two names: "
                    f"{', '.join(kwargs)}\n\nhint: use {', '.join(names.values())}"
                )
            for old in (old for old in names if old in kwargs):
                warnings.warn(
                    f"argument {old} of {function.__qualname__} is now {names[old]}; "
                    "the old name will be removed in 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
            return cast(Callable[..., Any], function)(*args, **present)

        return cast(Callable[P, R], call)

    return decorate


# names in these modules that changed as well
RENAMED = {
    "Choice": "Setting",
    "Counters": "CacheCounters",
    "Plan": "TuningProfile",
    "Way": "KernelConfig",
    "attend": "gat_aggregate",
    "ranked": "rank_by_score",
    "vote": "all_gather_scalar",
    "told": "broadcast_bytes",
}


class _OldModule(ModuleType):
    """A module that takes each name from where it is now, and says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for path in MOVED[self.__name__]:
            present = RENAMED.get(name, name)
            value = getattr(importlib.import_module(path), present, None)
            if value is not None:
                warnings.warn(
                    f"{self.__name__}.{name} moved to {path}.{present}; the old path will be "
                    "removed in 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find the modules that moved, and no others."""
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module whose names are looked up where they are now."""
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module's names are looked up on use."""


def install() -> None:
    """Let `import` find the old paths, after all others."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
