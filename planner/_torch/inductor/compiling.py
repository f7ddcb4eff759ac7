"""Inductor, from a graph of operator calls to the program that it emits, and to that program compiled.

Each function says what it hides. All of it was seen to work with torch 2.13.
"""

import contextlib
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._inductor import async_compile, config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from planner._torch.fake import without_modes
from planner._torch.inductor.decompositions import decompositions
from planner._torch.inductor.fusion import CHOICES, kernels_of_plans
from planner._torch.inductor.fusion_names import Fusion
from planner._torch.inductor.kernels import kernels_compiled_together
from planner._torch.patches import replaced
from planner.choices import CUDA_GRAPHS
from planner.errors import CompilerError

BoxedFunction = Callable[[list[Any]], Sequence[Any]]

_OURS: dict[str, Any] = {
    "cpp_wrapper": False,
    "custom_partitioner_fn": None,
    "fallback_random": True,
    "freezing": False,
    "graph_partition": False,
    "memory_planning": False,
    "reorder_for_peak_memory": False,
    CUDA_GRAPHS: False,
}
"""Settings that decide what is emitted, or how; what a plan predicts was made with these.

Inductor's own reordering for memory undoes the order of a schedule: peaks were up to a fifth higher with it.
"""


UNLESS_GIVEN: dict[str, Any] = {"layout_optimization": False}
"""Settings that options may change.

Inductor lays out convolutions with channels last: it copies inputs and weights, lays gradients of weights out
again, and the CPU's kernels need more inside. A ResNet's least peak was a quarter higher by that, its step no
faster. A schedule counts the layouts that the model has.
"""


def unusable_options(options: Mapping[Any, Any]) -> str | None:
    """What is wrong with options of Inductor, in one line; None if nothing is."""
    known = config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            return f"Inductor has no option {name!r}; torch._inductor.list_options() has them"
        if (name in _OURS and name != CUDA_GRAPHS) or name == "inductor_choices_class":
            return f"option {name!r} is set by the plan"
        if not isinstance(value, bool | int | float | str):
            return f"option {name!r} is a {type(value).__name__}; a plan keeps numbers, texts, True and False"
        now = known[name]
        if now is not None and type(now) is not type(value) and not isinstance(value, type(now)):
            return f"option {name!r} is {value!r}, Inductor expects a {type(now).__name__}"
    return None


@functools.cache
def missing_compiler() -> str | None:
    """What is wrong with the C++ compiler that Inductor calls, in one line; None if it is there."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def unused_vectors() -> str | None:
    """The vector instructions of this CPU, where Inductor takes it for one without; None if it does not.

    It looks by compiling and loading a library in another process, and takes any failure for a no: also that
    of a process which finds a file of the user's in the place of a module of Python's.
    """
    from torch._inductor import cpu_vec_isa

    there = torch.backends.cpu.get_cpu_capability()
    return None if there == "DEFAULT" or cpu_vec_isa.valid_vec_isa_list() else there


def retrace(
    function: Callable[..., Any], inputs: Sequence[Any], mode: Any, as_traced: int | None = None
) -> GraphModule:
    """Trace a function of tensors without data with Inductor's decompositions.

    Args:
        function: The function to trace.
        inputs: Its arguments, without data.
        mode: Their fake mode.
        as_traced: The number of first results that lie in memory as they were traced; Inductor lays out the
            others. None for all.
    """
    with (
        without_modes(),
        torch.no_grad(),
        _without_autocast(),
        tracing(TracingContext(mode)),
        # While Dynamo compiles, modules write their code late, and the key of Inductor's cache is another.
        _use_lazy_graph_module(False),
        mode,  # what the function makes has no data either
    ):
        traced: GraphModule = make_fx(
            function, decomposition_table=decompositions(), _allow_non_fake_inputs=True
        )(*inputs)
    output = traced.graph.output_node()
    visible = [isinstance(result, Node) for result in output.args[0]][:as_traced]  # type: ignore[union-attr]
    output.meta["user_visible_output_idxs"] = [i for i, is_made in enumerate(visible) if is_made]
    output.meta["original_output_strides"] = [
        value.stride() if isinstance(value, torch.Tensor) else None
        for value in (getattr(node, "meta", {}).get("val") for node in output.args[0])  # type: ignore
    ]
    return traced


def compiled(
    module: GraphModule,
    inputs: Sequence[Any],
    mode: Any,
    *,
    backward: bool,
    fusion: Fusion,
    options: Mapping[str, Any],
) -> tuple[BoxedFunction, str, list[Any]]:
    """The program of a graph that :func:`retrace` returned, compiled; its digest; its results' strides."""
    missing = missing_compiler()
    if missing is not None:
        raise CompilerError(f"{NO_COMPILER} ({missing})")
    with (
        _settings(options, fusion),
        kernels_compiled_together(),
        tracing(TracingContext(mode)),
        TracingContext.report_output_strides() as strides,
    ):
        function: Any = compile_fx_inner(module, list(inputs), is_backward=backward)
    return function, digest_of(getattr(function, "source_code", "")), list(strides or ())


NO_COMPILER = (
    "backend='inductor' needs a C++ compiler, and none that works was found: install g++, or name one in the "
    "environment variable CXX, or plan with backend='eager'"
)


@dataclass(frozen=True)
class Emitted:
    """A program that Inductor emitted for a graph; nothing of it is compiled.

    Attributes:
        source: Its Python source; "" where the graph calls nothing.
        run: Runs it on tensors without data: it allocates and frees, and computes nothing.
        strides: The strides of each result; None for one that is no tensor. Empty if it calls nothing.
    """

    source: str
    run: BoxedFunction
    strides: Sequence[Any]

    @property
    def digest(self) -> str:
        """See :func:`digest_of`."""
        return digest_of(self.source)


def digest_of(source: str) -> str:
    """Equal for programs that allocate, call and free the same."""
    _, _, body = source.partition("def call(")
    lines = body.partition("\nrunner = ")[0].splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def emitted(
    module: GraphModule,
    inputs: Sequence[Any],
    mode: Any,
    *,
    backward: bool,
    fusion: Fusion,
    options: Mapping[str, Any],
) -> Emitted:
    """The program that Inductor emits for a graph that :func:`retrace` returned.

    Inductor keeps it in its cache, and takes it from there: a graph is lowered once, while it is planned, and
    its kernels are compiled when it first runs.
    """
    found: list[tuple[str, dict[str, Any]]] = []

    def keep_source(_key: str, path: str, _lines: Any = None, attrs: Any = None, **_: Any) -> Any:
        found.append((Path(path).read_text(encoding="utf-8"), dict(attrs or {})))
        return types.SimpleNamespace(call=list, runner=None, __file__=path)

    with (
        _settings(options, fusion),
        tracing(TracingContext(mode)),
        TracingContext.report_output_strides() as strides,
        replaced(PyCodeCache, {"load_by_key_path": keep_source}),
    ):
        compiled = compile_fx_inner(module, list(inputs), is_backward=backward)
    if not found:
        return Emitted("", compiled, ())
    return Emitted(found[-1][0], _dry_program(*found[-1]), list(strides or ()))


_OF_TRITON = re.compile(
    r"^(import triton\b.*|from torch\._inductor\.runtime\.triton_heuristics .*|.* as get_raw_stream)$", re.M
)
"""What the head of a program for a GPU imports for its kernels. A build for the CPU lacks some of it."""


def _dry_program(source: str, constants: Mapping[str, Any]) -> BoxedFunction:
    scope: dict[str, Any] = {"__name__": "planner_emitted"}
    on_gpu = re.search(r"\b_DeviceGuard\((\d+)\)", source)
    with compile_lock, replaced(async_compile, {"AsyncCompile": _NoKernels}):
        exec(compile(_OF_TRITON.sub("", source), "<emitted>", "exec"), scope)
    scope.update(
        constants,
        assert_size_stride=_nothing,
        assert_alignment=_nothing,
        empty_strided_cpu=partial(_empty, "cpu"),
        reinterpret_tensor=torch.as_strided,
        alloc_from_pool=_no_pool,
    )
    if on_gpu:
        cuda = types.SimpleNamespace(
            _DeviceGuard=lambda _: contextlib.nullcontext(), set_device=_nothing, synchronize=_nothing
        )
        scope.update(
            torch=types.SimpleNamespace(**{**vars(torch), "cuda": cuda}),
            empty_strided_cuda=partial(_empty, f"cuda:{on_gpu[1]}"),
            copy_if_misaligned=lambda tensor: tensor,
            get_raw_stream=_nothing,
        )
    return scope["call"]  # type: ignore[no-any-return]


def _empty(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a kernel, or of a check."""


_nothing.run = _nothing  # type: ignore[attr-defined]  # kernels of a GPU are called so


def _no_pool(*_: Any) -> None:
    raise AssertionError("memory planning is off")


class _NoKernels:
    """In the place of what compiles kernels."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *args, **kwargs: _nothing

    def wait(self, _scope: Any) -> None:
        """Nothing was begun."""


@contextlib.contextmanager
def _settings(options: Mapping[str, Any], fusion: Fusion) -> Iterator[None]:
    choices = CHOICES[fusion]
    with (
        # What is patched is seen by all threads, and Inductor keeps what is compiled meanwhile for others.
        compile_lock,
        without_modes(),
        torch.no_grad(),
        _without_autocast(),
        # A part of the cache's key.
        config.patch(
            {**_OURS, **UNLESS_GIVEN, "inductor_choices_class": choices, **options, CUDA_GRAPHS: False}
        ),
        V.set_choices_handler(choices()),  # made already in this thread, perhaps, whatever the setting says
        kernels_of_plans(),
    ):
        yield


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with torch._C._DisableAutocast():
        yield
