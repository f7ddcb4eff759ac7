"""Which private names of PyTorch exist in which version, and what is done where one does not.

The product is developed with torch 2.13. A name that came later than the oldest version it runs on stands
here, with the version it came in and what is done without it; :func:`private` gives it, or None. Everything
else that is private is imported where it is used, in the other files of ``planner/_torch/``;
:data:`PRIVATE_MODULES` names where it comes from.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from planner.errors import PlannerError


@dataclass(frozen=True)
class Private:
    """A private name that not all supported versions have.

    Attributes:
        module, name: Where it is.
        since: The first version that has it, ``(major, minor)``.
        fallback: What is done where it is missing.
        argument: Of a function that older versions have too: the argument that is new.
    """

    module: str
    name: str
    since: tuple[int, int]
    fallback: str
    argument: str | None = None


TABLE = (
    Private(
        "torch._dynamo.variables.iter",
        "DictViewIterator",
        (2, 13),
        "iterators of dictionaries are those of lists, which Dynamo rebuilds after a graph break by itself",
    ),
    Private(
        "torch._dynamo.eval_frame",
        "_optimize",
        (2, 13),
        "the planned shape and the others get a function of their own each; code called inside that breaks a "
        "graph looks up the captures of both",
        argument="isolate_recompiles",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "_default_reduce_scatter_input_fn",
        (2, 15),
        "fully_shard keeps gradients as they are computed, and casts, adds up and reduces them by itself",
    ),
    Private(
        "torch.distributed.pipelining.schedules",
        "_wait_and_release_fwd_send",
        (2, 15),
        "stages of pipelines hold what they sent until its backward, and buffers to receive throughout",
    ),
)


PRIVATE_MODULES = {
    "torch": "shapes of lists of updates, functional tensors, negative views",
    "torch._C": "dispatch keys, modes, autocast and numerical settings, nodes of autograd",
    "torch._C._autograd": "version counters, the running graph task, the profiler's state",
    "torch._C._dynamo.eval_frame": "how a frame is run from now on",
    "torch._C._dynamo.guards": "whether a dictionary changed",
    "torch._C._functorch": "whether a transform of torch.func is running",
    "torch._C._nn": "operators as Python functions",
    "torch._C._profiler": "events of memory",
    "torch._compile": "the file that Dynamo skips",
    "torch._decomp": "the table of decompositions",
    "torch._dispatch.python": "dispatching in Python, as AOTAutograd does",
    "torch._dynamo": "compiling a function, and forgetting it",
    "torch._dynamo.backends.common": "AOTAutograd as a backend",
    "torch._dynamo.bytecode_transformation": "code that goes on behind a break",
    "torch._dynamo.config": "settings",
    "torch._dynamo.convert_frame": "the lock of all captures",
    "torch._dynamo.decorators": "breaks that are errors",
    "torch._dynamo.device_interface": "what is asked of a GPU",
    "torch._dynamo.eval_frame": "callbacks, stances",
    "torch._dynamo.exc": "what ends a capture",
    "torch._dynamo.guards": "guards of inputs",
    "torch._dynamo.source": "where a value comes from",
    "torch._dynamo.symbolic_convert": "the translator of a frame",
    "torch._dynamo.trace_rules": "how calls of a function are treated",
    "torch._dynamo.types": "what a callback returns",
    "torch._dynamo.utils": "counters, iterators of tuples",
    "torch._dynamo.variables.base": "the class of all variables",
    "torch._dynamo.variables.builder": "how a value becomes a variable",
    "torch._dynamo.variables.constant": "constants",
    "torch._dynamo.variables.functions": "functions of the user's",
    "torch._dynamo.variables.higher_order_ops": "checkpoints",
    "torch._dynamo.variables.lazy": "variables that are made when asked for",
    "torch._dynamo.variables.lists": "lists and their iterators",
    "torch._dynamo.variables.misc": "autograd functions of the user's",
    "torch._dynamo.variables.nn_module": "modules",
    "torch._dynamo.variables.tensor": "tensors and numbers of theirs",
    "torch._dynamo.variables.torch": "functions of PyTorch",
    "torch._functorch._aot_autograd.collect_metadata_analysis": "what a graph does to its inputs",
    "torch._functorch._aot_autograd.descriptors": "what inputs and outputs of a joint graph are",
    "torch._functorch._aot_autograd.runtime_wrappers": "what runs around the two",
    "torch._functorch._aot_autograd.schemas": "layouts of tangents",
    "torch._functorch.aot_autograd": "the whole of it",
    "torch._functorch.config": "settings",
    "torch._guards": "the context of a trace",
    "torch._higher_order_ops.effects": "operators with effects",
    "torch._inductor.async_compile": "compiling kernels",
    "torch._inductor.choices": "choices of fusion",
    "torch._inductor.codecache": "programs and kernels as files",
    "torch._inductor.codegen.cpp": "kernels for the CPU",
    "torch._inductor.codegen.segmented_tree": "peaks over a stretch of lines",
    "torch._inductor.codegen.wrapper": "lines of a program",
    "torch._inductor.compile_fx": "lowering a graph",
    "torch._inductor.config": "settings",
    "torch._inductor.cpp_builder": "the compiler",
    "torch._inductor.cpu_vec_isa": "vector instructions",
    "torch._inductor.decomposition": "its table of decompositions",
    "torch._inductor.exc": "a compiler that is not there",
    "torch._inductor.lowering": "operators that are called as they are",
    "torch._inductor.runtime.hints": "properties of a GPU",
    "torch._inductor.scheduler": "the order of kernels",
    "torch._inductor.utils": "what kernels a GPU lacks",
    "torch._inductor.virtualized": "what is being lowered",
    "torch._library.fake_class_registry": "objects of TorchScript without data",
    "torch._meta_registrations": "shapes of results",
    "torch._ops": "operators and their overloads",
    "torch._prims_common": "strides of memory formats",
    "torch._subclasses._fake_tensor_utils": "keys of remembered calls",
    "torch._subclasses.fake_impls": "operators without data",
    "torch._subclasses.fake_tensor": "tensors without data",
    "torch._subclasses.functional_tensor": "tensors whose writes become results",
    "torch.amp.autocast_mode": "autocast in traced code",
    "torch.autograd": "the engine's callbacks, numbers of nodes",
    "torch.autograd.forward_ad": "whether forward mode is on",
    "torch.autograd.graph": "running the engine",
    "torch.cuda": "a kernel that waits",
    "torch.distributed.distributed_c10d": "the job's store",
    "torch.fx._lazy_graph_module": "code of graphs that is written late",
    "torch.fx._symbolic_trace": "whether a trace is running",
    "torch.fx.node": "names of functions",
    "torch.fx.passes._tensorify_python_scalars": "numbers as tensors",
    "torch.nn": "what a module's call runs",
    "torch.nn.modules.module": "hooks on all modules",
    "torch.nn.parallel": "the reducer of gradients",
    "torch.ops": "operators whose names begin with a line",
    "torch.utils._mode_utils": "calls without modes",
    "torch.utils._python_dispatch": "modes that are on",
    "torch.utils._pytree": "trees of tensors",
    "torch.utils._triton": "whether Triton is here",
}
"""The modules of PyTorch of which we use private names, or which are private, and for what.

What is replaced in them is in :data:`planner._torch.patches.PATCHES`.
"""

OLDEST, NEWEST = (2, 13), (2, 15)
"""The versions between which graphs were tested; see ``docs/results/versions.md``."""


def version() -> tuple[int, int]:
    """Major and minor version of the PyTorch that is installed."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def graphs_are_off() -> str | None:
    """Why no graph is captured with the PyTorch that is installed; None where graphs were tested with it."""
    if OLDEST <= version() <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return f"PyTorch {torch.__version__} is none of those that graphs were tested with ({oldest} to {newest})"


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which PyTorch has from 2.7 on."""
    asked = getattr(torch.compiler, "is_exporting", None)
    return asked is not None and bool(asked())


def disable(function: Any, reason: str) -> Any:
    """``torch.compiler.disable``, which takes a reason from 2.7 on."""
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(function, reason=reason)
    return torch.compiler.disable(function)


class _Missing(type):
    """What stands for a private name that another PyTorch lacks: graphs alone need it, and are off there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise PlannerError(f"{cls.__name__}: {graphs_are_off()}. Plan with backend='replay'")


def of_graphs(module: str, *names: str) -> Any:
    """A module of PyTorch's that only graphs need, or names in it.

    What the PyTorch that is installed lacks is a stand-in, if graphs are off with it.

    Raises:
        ImportError: It lacks one, and graphs were tested with it.
    """
    try:
        there = import_module(module)
    except ImportError:
        if graphs_are_off() is None:
            raise
        there = _Missing(module, (), {})  # type: ignore[assignment]
    if not names:
        return there
    found = []
    for name in names:
        try:
            found.append(getattr(there, name, None) or import_module(f"{module}.{name}"))
        except ImportError:
            if graphs_are_off() is None:
                raise
            found.append(_Missing(name, (), {}))
    return found[0] if len(found) == 1 else tuple(found)


def private(name: str) -> Any:
    """The object of a name in :data:`TABLE`, or None where this PyTorch does not have it."""
    row = next(row for row in TABLE if row.name == name)
    try:
        module = import_module(row.module)
    except ModuleNotFoundError:
        return None
    return getattr(module, row.name, None)


def takes_argument(name: str, argument: str) -> bool:
    """Whether the function of a name in :data:`TABLE` takes an argument that older versions do not have."""
    function = private(name)
    return function is not None and argument in inspect.signature(function).parameters
