"""The state of Python that a step changes: attributes, counters, caches, variables of functions."""

import dis
import functools
import io
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.addresses import identity
from planner.heap import collector_off
from planner.module_parts import parts_of
from planner.training_step.generators import is_generator

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_CONTAINER_TYPES = frozenset(CONTAINERS)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device))
"""Types of values that a step may replace by others, but does not change."""
FUNCTIONS = (FunctionType, MethodType, functools.partial)
_NOT_OF_USERS = frozenset(("torch", "planner", "numpy", *sys.stdlib_module_names))
"""Packages of whose classes no attributes are noted."""
MOST_ELEMENTS = 10_000
"""Larger containers are data sets and vocabularies, which take long to walk: they are not looked into. So
many tuples take 2 ms, and a million 0.4 s, each time."""
_MOST_NUMBERS = 1_000_000
"""Larger arrays of NumPy are data sets, which would be copied: they are not noted. So many numbers are copied
in a millisecond."""
_STEPPING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_MISSING = object()
"""Stands for a variable that does not exist, or a cell that is empty."""
_NAME_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
"""The instructions of Python that have the name of a global variable."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class PythonState:
    """Attributes, contents of plain containers and variables of functions, as they are when this is made.

    The state is that of the modules and all below them, of the objects that their hooks and other functions
    among their attributes refer to, and of `others`. Numbers and texts in global variables that methods of
    the modules write to belong to it. Tensors are not copied: their data stay as the step leaves them.

    Args:
        modules: Modules.
        others: Functions, arguments and other objects, with the objects that these hold.
        objects: Whether objects among the attributes of modules are noted, too.
        variables: More global variables to note: the ``globals()`` that each is in, its name and its value.

    Attributes:
        modules: All modules that were reached.
        tensors: Tensors that were reached besides those that are parameters, buffers or other attributes of
            these modules.
        generators: The random generators that were reached.
        iterators: The iterators that functions among these name or are given. Those among the attributes of
            the modules are copied with these, and left out.
    """

    @collector_off()
    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[Any] = (),
        *,
        objects: bool = False,
        variables: Iterable[tuple[dict[str, Any], str, Any]] = (),
    ) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self.iterators: list[Any] = []
        self._attributes: list[tuple[type, str, Any]] = []  # iterators of users' objects
        self._functions: list[Any] = []
        self._contents: dict[int, tuple[Any, Any]] = {}  # by identity: a container, and a copy of it
        self._empty: list[Any] = []  # most containers: a module has ten for hooks
        self._cells: list[tuple[CellType, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        # Values still to visit. The index is a depth: through how many more objects of users the walk may go.
        self._pending: tuple[list[Any], ...] = ([], [], [])
        self._seen: dict[int, Any] = {}
        self._pending[first := 2 if objects else 0].extend(modules)
        self._visit(first)  # before `others`, which may refer to these modules, too
        self.iterators.clear()
        self._attributes.clear()
        self._pending[2].extend(others)
        self._visit_all()
        classes = dict.fromkeys(base for part in self.modules for base in type(part).__mro__)
        of_classes = [f for kind in classes for f in _functions_of(kind)]
        noted = [f for f in self._functions if isinstance(f, FunctionType)]
        functions = with_those_named([*of_classes, *noted])
        own = [kind for kind in classes if not _is_library(kind)]
        named = [v for f in functions for v in globals_named_in(f).values()]
        known = [v for v in named if is_generator(v) or _is_iterator(v) or (objects and _holds_stepping(v))]
        self._pending[1].extend(known)
        held = (v for f in self._functions for v in referred(f))
        self.iterators += filter(_is_iterator, (*named, *held))
        self.iterators += [v for kind, name, v in self._attributes if names_attribute(functions, kind, name)]
        lasting = [*(vars(kind).values() for kind in own), *map(_defaults_of, functions)]
        self._pending[1].extend(v for values in lasting for v in values if type(v) in _CONTAINER_TYPES)
        self._visit_all()
        self._of_classes = [
            (kind, name, v) for kind in own for name, v in vars(kind).items() if type(v) in (bool, int, float)
        ]
        # They would hold values that a step frees.
        del self._pending, self._seen, self._functions, self._attributes
        self._globals = [*variables] + [
            (space, name, space[name])
            for space, name in ((f.__globals__, name) for f in functions for name in written_by_function(f))
            if type(space.get(name, _MISSING)) in _ATOMS
        ]

    def let_go_of_graphs(self) -> None:
        """Have tensors with a history put back without it: as leaves, of the same data.

        A graph that is held holds the earlier states that its blocks hold, and so on.
        """
        self.tensors = [tensor for tensor in self.tensors if tensor.grad_fn is None]
        self._cells = [(cell, _as_leaf(content)) for cell, content in self._cells]
        for _, saved in self._contents.values():
            if isinstance(saved, dict):
                changed = {n: leaf for n, v in saved.items() if (leaf := _as_leaf(v)) is not v}
                dict.update(saved, changed)
            elif not isinstance(saved, set):
                for place, value in enumerate(saved):
                    saved[place] = _as_leaf(value)

    def restore(self) -> None:
        """Put everything back as it was, in the same containers."""
        for container in self._empty:
            if container:
                container.clear()
        for container, saved in self._contents.values():
            put_back(container, saved)
        for cell, content in self._cells:
            if _content(cell) is content:
                continue
            if content is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = content
        for array, numbers in self._arrays:
            if array.flags.writeable:
                array[...] = numbers
        for space, name, value in self._globals:
            space[name] = value
        for kind, name, value in self._of_classes:
            if vars(kind).get(name, _MISSING) is not value:
                setattr(kind, name, value)

    def changed(self) -> bool:
        """Whether something of it is another object now; attributes of classes are left out."""
        return (
            any(self._empty)
            or any(not _same(container, saved) for container, saved in self._contents.values())
            or any(_content(cell) is not content for cell, content in self._cells)
            or any(not np.array_equal(array, numbers) for array, numbers in self._arrays)
            or any(space.get(name, _MISSING) is not value for space, name, value in self._globals)
        )

    def put_back_history(self) -> None:
        """Take out tensors with a ``grad_fn`` that are in containers now, and put back the earlier values."""
        for container in self._empty:
            if _has_history(container):
                container.clear()
        for container, saved in self._contents.values():
            if not isinstance(container, dict):
                if _has_history(container):
                    put_back(container, saved)
                continue
            for name in [name for name, value in container.items() if _has_history(value)]:
                if name in saved:
                    container[name] = saved[name]
                else:
                    del container[name]

    def _visit_all(self) -> None:
        while (depth := next((n for n in (2, 1, 0) if self._pending[n]), None)) is not None:
            self._visit(depth)

    def _visit(self, depth: int) -> None:
        """Visit what is pending at a depth, and what it leads to at the same one."""
        pending, seen, contents, empty = self._pending[depth], self._seen, self._contents, self._empty
        while pending:
            value = pending.pop()
            kind = type(value)
            if kind in _CONTAINER_TYPES:
                if not value:
                    empty.append(value)
                elif (number := identity(value)) not in contents:
                    contents[number] = (value, value.copy())
                    # Large containers of objects of users are data sets and vocabularies.
                    if depth != 1 or len(value) <= MOST_ELEMENTS:
                        held = value.values() if isinstance(value, dict) else value
                        # Nearly all values in modules are switches, or empty dictionaries for hooks.
                        some = [value for value in held if type(value) not in _ATOMS]
                        pending += [v for v in some if type(v) not in _CONTAINER_TYPES or v]
                        empty += [v for v in some if type(v) in _CONTAINER_TYPES and not v]
            elif kind not in _ATOMS and (number := identity(value)) not in seen:
                seen[number] = value
                self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        """Note a value that is no container, or have noted what it holds."""
        pending = self._pending[depth]
        # Not isinstance: it reads __class__, which may fail on an object that stands in for another.
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if depth == 2:
                self.tensors.append(value)
        elif issubclass(kind, nn.Module):
            for part in parts_of(value):
                if part is value or identity(part) not in self._seen:
                    self._seen[identity(part)] = part
                    self.modules.append(part)
                    pending.append(vars(part))
                    self._note_hooks(part)
        elif kind is tuple:
            pending += value
        elif issubclass(kind, FUNCTIONS):
            self._note_function(value)
        elif is_generator(value):
            self.generators.append(value)
        elif issubclass(kind, _STEPPING):  # a step changes their tensors, too
            self._pending[2].append(vars(value))
        elif kind is np.ndarray:
            if value.size <= _MOST_NUMBERS:
                self._arrays.append((value, value.copy()))
        else:
            if depth == 2 and _is_iterator(value):
                self.iterators.append(value)
            if depth and is_of_users(value):
                self._attributes += [(kind, n, v) for n, v in vars(value).items() if _is_iterator(v)]
                self._pending[depth - 1].append(vars(value))

    def _note_function(self, function: Any) -> None:
        """Note the variables of a function that is the user's, and of the objects that it refers to."""
        if belongs_to(getattr(function, "__module__", None), "torch", "planner"):
            return
        if isinstance(function, FunctionType):
            for cell in function.__closure__ or ():
                content = _content(cell)
                self._cells.append((cell, content))
                if issubclass(type(content), torch.Tensor):
                    self.tensors.append(content)
            named = globals_named_in(function).values()
            self._pending[1].extend(v for v in named if is_generator(v) or _holds_stepping(v))
        self._functions.append(function)
        self._pending[1].extend(referred(function))

    def _note_hooks(self, part: nn.Module) -> None:
        """Note the attributes of hooks, a library's too, and those of the objects that they refer to."""
        for name, hooks in vars(part).items():
            if isinstance(hooks, dict) and hooks and name.endswith("_hooks"):
                for hook in hooks.values():
                    partial = isinstance(hook, functools.partial)  # PyTorch's own, bound to its state
                    for held in (hook,) if partial else (hook, *referred(hook)):
                        if _has_attributes(held) and not issubclass(type(held), nn.Module | type):
                            self._pending[1].append(vars(held))


def with_those_named(functions: list[FunctionType]) -> list[FunctionType]:
    """Functions, and those of users that they call by the name of a global variable, and so on."""
    found, pending = dict.fromkeys(functions), list(functions)
    while pending:
        for named in globals_named_in(pending.pop()).values():
            if (
                isinstance(named, FunctionType)
                and named not in found
                and not belongs_to(named.__module__, *_NOT_OF_USERS)
            ):
                found[named] = None
                pending.append(named)
    return list(found)


def _defaults_of(function: FunctionType) -> list[Any]:
    """The default values of a function's arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _functions_of(kind: type) -> list[FunctionType]:
    """The methods that a class of the user's defines itself; none of a library's class."""
    return [] if _is_library(kind) else [f for f in vars(kind).values() if isinstance(f, FunctionType)]


def written_by_function(function: FunctionType) -> list[str]:
    """The global variables that a function writes to."""
    if _STORE_GLOBAL not in function.__code__.co_code[::2]:  # every second byte is an instruction's code
        return []
    return [str(i.argval) for i in dis.get_instructions(function) if i.opcode == _STORE_GLOBAL]


def globals_named_in(function: FunctionType) -> dict[str, Any]:
    """The global variables that a function, or one defined inside of it, names."""
    variables, named = function.__globals__, dict[str, Any]()
    for code in codes(function.__code__):
        named |= {name: variables[name] for name in _names_of_globals(code) if name in variables}
    return named


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those defined inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@functools.lru_cache(4096)
def _names_of_globals(code: CodeType) -> tuple[str, ...]:
    """The names of global variables in code; ``co_names`` has those of attributes too."""
    named = (i.argval for i in dis.get_instructions(code) if i.opname in _NAME_GLOBALS)
    return tuple(dict.fromkeys(named))


def is_stepping(value: Any) -> bool:
    """Whether a value is an optimizer, a scheduler or a gradient scaler, which ``step()`` changes."""
    return issubclass(type(value), _STEPPING)


def _is_iterator(value: Any) -> bool:
    """Whether a value gives each of its items once. A counter's numbers are as good as later ones."""
    return issubclass(kind := type(value), Iterator) and not issubclass(kind, io.IOBase | itertools.count)


def names_attribute(functions: Iterable[FunctionType], kind: type, name: str) -> bool:
    """Whether functions, or methods of a class that they name, name an attribute of it."""
    methods = {n: f for base in kind.__mro__[::-1] for n, f in vars(base).items() if type(f) is FunctionType}
    names, pending = set[str](), [*functions]
    while pending:
        new = {n for code in codes(pending.pop().__code__) for n in code.co_names} - names
        names |= new
        pending += [methods[n] for n in new if n in methods and n != "__init__"]
    return name in names


def _holds_stepping(value: Any) -> bool:
    """Whether a value is such an object, or a container of one."""
    if type(value) not in _CONTAINER_TYPES and type(value) is not tuple:
        return is_stepping(value)
    if len(value) > MOST_ELEMENTS:
        return False
    return any(map(is_stepping, value.values() if isinstance(value, dict) else value))


def referred(function: Any) -> list[Any]:
    """The objects that a function refers to besides its arguments and globals."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        return [function.__func__, function.__self__]
    values = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    values += getattr(function, "__defaults__", None) or ()
    values += (getattr(function, "__kwdefaults__", None) or {}).values()
    return [value for value in values if value is not _MISSING]


def put_back(container: Any, saved: Any) -> None:
    """Give a container back the very objects that it held."""
    if _same(container, saved):
        return
    container.clear()
    if isinstance(container, Counter):
        dict.update(container, saved)  # Counter.update adds to counts
    elif isinstance(container, dict):
        container.update(saved)  # dict.update would leave an OrderedDict without its order
    else:
        (container.update if isinstance(container, set) else container.extend)(saved)


def _same(container: Any, saved: Any) -> bool:
    """Whether two containers hold the very same objects in the same order; of sets, the same elements."""
    if isinstance(container, set):
        return bool(container == saved)
    if len(container) != len(saved):
        return False
    if not isinstance(container, dict):
        return all(map(is_, container, saved))
    return all(map(is_, container, saved)) and all(map(is_, container.values(), saved.values()))


def _as_leaf(value: Any) -> Any:
    """A tensor, or those in a tuple, without history; anything else as it is."""
    if type(value) is tuple:
        leaves = tuple(map(_as_leaf, value))
        return value if all(map(is_, leaves, value)) else leaves
    if not issubclass(type(value), torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_()


def _has_history(value: Any, deep: int = 4) -> bool:
    """Whether a tensor, or one in nested containers, has a ``grad_fn``."""
    if issubclass(type(value), torch.Tensor):
        return value.grad_fn is not None
    if deep and (type(value) in _CONTAINER_TYPES or type(value) is tuple):  # containers may hold each other
        held = value.values() if isinstance(value, dict) else value
        return any(_has_history(one, deep - 1) for one in held)
    return False


def _content(cell: CellType) -> Any:
    """What a variable of an enclosing function holds; ``_MISSING`` where nothing was assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _has_attributes(value: Any) -> bool:
    """Whether a value has a ``__dict__`` of its own."""
    try:
        return isinstance(value.__dict__, dict)
    except Exception:  # it has none, or stands in for another object
        return False


def is_of_users(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class of the user's or of another library."""
    kind = type(value)
    if kind is not SimpleNamespace and (
        issubclass(kind, type | ModuleType) or kind.__module__.partition(".")[0] in _NOT_OF_USERS
    ):
        return False
    return _has_attributes(value)


def belongs_to(name: str | None, *packages: str) -> bool:
    """Whether a module of Python, as in ``__module__``, belongs to one of some packages."""
    return (name or "").partition(".")[0] in packages


class Namespaces:
    """The variables of classes and files, and plain containers among them, where a step may leave tensors.

    Values other than tensors stay as the step leaves them: entries of a cache belong together.

    Args:
        module: The classes are those of its parts, and the files are those that define them.
        loss: The file that defines it is another one.
    """

    def __init__(self, module: nn.Module, loss: Any) -> None:
        classes = dict.fromkeys(
            base for part in parts_of(module) for base in type(part).__mro__ if not _is_library(base)
        )
        functions = [f for base in classes for f in vars(base).values()]
        functions += [f for part in parts_of(module) for f in vars(part).values()]
        functions += [loss, getattr(loss, "forward", None)]
        files: dict[int, dict[str, Any]] = {}
        for function in functions:
            plain = function.__func__ if isinstance(function, MethodType) else function
            if isinstance(plain, FunctionType) and not _is_library(plain):
                files[id(plain.__globals__)] = plain.__globals__
        spaces: list[tuple[Mapping[str, Any], _Change]] = [(vars(base), _of_class(base)) for base in classes]
        spaces += [(file, _of_file(file)) for file in files.values()]
        self._spaces = [(space, dict(space), change) for space, change in spaces]
        self._contents = [
            (value, value.copy())
            for space, _ in spaces
            for value in list(space.values())
            if type(value) in CONTAINERS and len(value) <= MOST_ELEMENTS
        ]

    def take_out_tensors(self) -> None:
        """Take out the tensors that are there now and were not, and put back the earlier values."""
        for space, saved, change in self._spaces:
            for name, value in list(space.items()):
                before = saved.get(name, _MISSING)
                if value is not before and _has_tensors(value):
                    change(name, before)
        for container, saved in self._contents:
            if _has_tensors(container):
                put_back(container, saved)


_Change = Callable[[str, Any], None]
"""Gives a variable, by its name, a value; ``_MISSING`` deletes it."""


def _of_class(kind: type) -> _Change:
    def change(name: str, value: Any) -> None:
        delattr(kind, name) if value is _MISSING else setattr(kind, name, value)

    return change


def _of_file(variables: dict[str, Any]) -> _Change:
    def change(name: str, value: Any) -> None:
        if value is not _MISSING:
            variables[name] = value
        elif not name.startswith("__"):  # Dynamo sets variables of such names, which its code reads
            del variables[name]

    return change


def _is_library(value: Any) -> bool:
    """Whether a class or function is PyTorch's or Python's; numpy's and other libraries' count as users'."""
    return belongs_to(value.__module__, "torch", "builtins", "abc", "typing")


def _has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container that has one itself, not in a further one."""
    if isinstance(value, torch.Tensor):
        return True
    if type(value) not in (*CONTAINERS, tuple) or len(value) > MOST_ELEMENTS:
        return False
    members = value.values() if isinstance(value, dict) else value
    return any(isinstance(member, torch.Tensor) for member in list(members))
