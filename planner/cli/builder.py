"""From `pkg.module:build` on a command line to a model and its example inputs."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.cli.own_packages import hidden_by_own, import_own
from planner.errors import PlannerError
from planner.progress import Progress

if TYPE_CHECKING:
    from torch import nn


class BuilderError(PlannerError):
    """What a reference names cannot be found, imported, called, or is not what it should be."""


@dataclass(frozen=True)
class Built:
    """What a builder returns."""

    model: "nn.Module"
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_reference(reference: str) -> Callable[..., Any]:
    """Import a function named as `pkg.module:function` or `path/to/file.py:function`.

    The current directory is searched as well, as Python itself does for `python -m`.

    Raises:
        BuilderError: there is no such module or function, importing it raises, or it cannot be called.
    """
    place, colon, attribute = reference.rpartition(":")
    if not colon or not place or not attribute:
        raise BuilderError(f"{reference!r}: expected pkg.module:function or path/to/file.py:function")
    if place.endswith(".py") or os.sep in place:
        if not os.path.isfile(place):
            raise BuilderError(f"{place}: no such file")
        import_own()
        _search(os.getcwd())
        found: Any = _import_file(place)
    else:
        import_own()
        _search(os.getcwd())
        found = _import_module(place)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BuilderError(f"{reference!r}: {place} has no {attribute}") from None
    if not callable(found):
        raise BuilderError(f"{reference!r}: {attribute} is a {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


def build(reference: str, progress: Progress) -> Built:
    """Call a builder and check what it returns: (model, args) or (model, args, kwargs).

    The arguments are in any form that :func:`planner.plan` takes.

    Args:
        reference: where the builder is, as for `load_reference`.
        progress: called with what is being done.

    Raises:
        BuilderError: as `load_reference`, or the builder raises, or returns something else.
    """
    return _checked(reference, _called(reference, progress))


def build_for_batches(reference: str, progress: Progress) -> "tuple[nn.Module, Callable[[int], Any]]":
    """Call a builder of a model for any batch, as `build`: it returns (model, make_args).

    Raises:
        BuilderError: as `load_reference`, or the builder raises, or returns something else.
    """
    result = _called(reference, progress)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise BuilderError(f"{reference!r} returned a {type(result).__name__}: expected (model, make_args)")
    model = _checked_model(reference, result[0])
    if not callable(result[1]):
        raise BuilderError(
            f"{reference!r} returned a {type(result[1]).__name__} as make_args: expected a function from a "
            "batch to the arguments of the model"
        )
    return model, result[1]


def _called(reference: str, progress: Progress) -> Any:
    progress("importing PyTorch and the model's code", 0.0)
    function = load_reference(reference)
    progress("building the model", 0.0)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise BuilderError(f"{reference!r} raised {_summary(error)}") from error


def _checked(reference: str, result: Any) -> Built:
    from planner.training_step.inputs import InputError, read_step

    expected = "expected (model, args) or (model, args, kwargs)"
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise BuilderError(f"{reference!r} returned a {type(result).__name__}{count}: {expected}")
    model = _checked_model(reference, result[0])
    try:
        step = read_step(model, *result[1:], of=reference)
    except InputError as error:
        raise BuilderError(f"{reference!r} returned what cannot be read as (model, args): {error}") from error
    return Built(model, step.args, dict(step.kwargs))


def _checked_model(reference: str, model: object) -> "nn.Module":
    from planner.training_step.inputs import InputError, check_model

    try:
        return check_model(model)
    except InputError as error:
        raise BuilderError(f"{reference!r} returned no model: {error}") from error


def _import_module(name: str) -> ModuleType:
    try:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        there = None if spec is None or spec.origin is None else _imported(spec.origin)
        return importlib.import_module(name) if there is None else there
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise BuilderError(
                f"no module named {error.name!r}, here or installed{hidden_by_own(error)}"
            ) from None
        raise BuilderError(f"importing {name} raised {_summary(error)}") from error
    except (Exception, SystemExit) as error:
        raise BuilderError(f"importing {name} raised {_summary(error)}") from error


def _import_file(path: str) -> ModuleType:
    path = os.path.abspath(path)
    stem = os.path.splitext(os.path.basename(path))[0]
    if (there := _imported(path)) is not None:
        return there  # the loss of a file reads the weights of the model of that file
    # Under its own name, unless that would hide, or be taken for, another module.
    name = stem
    if stem in sys.modules or stem in sys.stdlib_module_names or not stem.isidentifier():
        name = f"_built_from_{stem}"
    _search(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuilderError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise BuilderError(f"importing {path} raised {_summary(error)}") from error
    return module


def _imported(path: str) -> ModuleType | None:
    """The module that was imported from a file, under whatever name."""
    name, real = os.path.basename(path), os.path.realpath(path)
    for module in list(sys.modules.values()):
        known = getattr(module, "__dict__", {}).get("__file__")  # some modules import what they are asked for
        if isinstance(known, str) and os.path.basename(known) == name and os.path.realpath(known) == real:
            return module
    return None


def _search(directory: str) -> None:
    if directory not in sys.path and not (directory == os.getcwd() and "" in sys.path):
        sys.path.insert(0, directory)


def _summary(error: BaseException) -> str:
    text = " ".join(str(error).split())
    hidden = hidden_by_own(error) if isinstance(error, ImportError) else ""
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + hidden
