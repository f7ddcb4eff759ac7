"""The lowering by Inductor: the graphs of a schedule, compiled as ``torch.compile`` compiles its own.

A graph is traced once more with Inductor's decompositions. Draws of random numbers become operators that
Inductor cannot reorder; a draw that runs again starts from the state that its first run saw. They call
eager's operators, so masks, and the generators after the step, are eager's. Inductor may fuse and order all
else. The program that it emits shows what is freed, and when: `planner/problem/emitted_step.py` runs it
without data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from planner._torch import fake, operators
from planner._torch.elsewhere import DEVICE, named_anew
from planner._torch.execution.mask_operators import MASKED_PRODUCT
from planner._torch.execution.own_backwards import memory_format
from planner._torch.execution.pooling_operators import GIVEN_TENSORS
from planner._torch.inductor import compiling, random_operators
from planner._torch.inductor.elsewhere import Gpu, lowered_for
from planner._torch.inductor.fusion_names import Fusion
from planner._torch.inductor.order import FREED, KEPT, realize_in_place
from planner._torch.joint.aot import BoxedFunction
from planner.errors import CaptureError, PlannerError
from planner.graph.in_place import OnCopy, operator_in_place
from planner.graph.overwritten import alias
from planner.graph.replay import rng, rnn_reserve
from planner.lowering.partition import Role, user_outputs

Strides = tuple[int, ...]


@dataclass(frozen=True)
class InductorGraph:
    """A graph in the form that Inductor compiles.

    Attributes:
        module: The graph, with Inductor's decompositions.
        inputs: The inputs that it reads, as tensors without data. A program that Inductor emits would hold
            unread inputs until it returns.
        mode: Their fake mode.
        aliases: Outputs that are aliases of inputs, which a wrapper makes: position of the output -> position
            of the input.
        draws: Whether it draws random numbers: its last output is then a token.
        read: Positions of ``inputs`` among the inputs of the graph that was traced.
        given: How many inputs that graph has.
        strides: The strides of each output of that graph; None where it is no tensor.
    """

    module: GraphModule
    inputs: Sequence[Any]
    mode: Any
    aliases: Mapping[int, int]
    draws: bool
    read: Sequence[int]
    given: int
    strides: Sequence[Strides | None]


def for_inductor(
    module: GraphModule,
    strides: Sequence[Strides | None] = (),
    *,
    in_order: bool = True,
    elsewhere: bool = False,
) -> InductorGraph:
    """Trace a graph of operator calls with Inductor's decompositions.

    Args:
        module: A half of a :class:`planner.lowering.partition.Partition`, or another graph of operator calls.
        strides: Strides of its first inputs, where they differ from those that the graph was traced with.
        in_order: Whether a result is computed at its place in the graph where that frees memory earlier; if
            not, Inductor chooses the place of each.
        elsewhere: Whether tensors on the CPU stand for those of a GPU that is not here.

    Raises:
        CaptureError: Its sizes are symbolic, or it has an operator that Inductor cannot run.
    """
    _refuse(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    if any(map(_is_sized_by_symbols, values)):
        raise CaptureError(
            "backend='inductor' compiles for shapes, not for symbolic sizes: plan for each shape"
        )
    mode = fake.fake_mode_with_sizes(elsewhere=elsewhere)
    inputs = _without_data(values, mode, strides, elsewhere)
    positions = {node: i for i, node in enumerate(placeholders)}
    results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    aliases = {
        i: positions[node.args[0]]
        for i, node in enumerate(results)
        if isinstance(node, Node) and node.target is alias and node.args[0] in positions
    }
    laid_out = {i: value.stride() for i, j in aliases.items() if isinstance(value := inputs[j], torch.Tensor)}
    kept = _without_outputs(module, aliases.keys()) if aliases else module
    emitter = _ForInductor(kept, elsewhere)

    def function(*arguments: Any) -> list[Any]:
        emitter.token = None
        # Inductor's decompositions may compute other types than kernels, as bfloat16 statistics instead of
        # floats; the other half reads the types of the graph.
        outputs = [_of_type(*pair) for pair in zip(emitter.run(*arguments), types, strict=True)]
        return outputs if emitter.token is None else [*outputs, emitter.token]

    types = [_type_of(node) for node in kept.graph.output_node().args[0]]  # type: ignore[union-attr]
    own = user_outputs(module)
    # Inductor may choose the strides of saved tensors, as convolutions prefer some; the backward is told of
    # them.
    as_traced = None if own is None else own - sum(i < own for i in aliases)
    traced = compiling.retrace(function, inputs, mode, as_traced)
    if elsewhere:
        named_anew(traced.graph)
    for node in traced.graph.nodes:
        if _is_sized_by_data(node):
            raise CaptureError(
                f"backend='inductor' needs sizes that do not depend on data, and those of {node.target} do; "
                "plan with backend='eager'"
            )
    outputs = iter(traced.graph.output_node().args[0])  # type: ignore[arg-type]
    found = [laid_out[i] if i in laid_out else _strides(next(outputs)) for i in range(len(results))]
    read = _without_unread(traced, _names(placeholders))
    if in_order:
        realize_in_place(traced)
    draws = emitter.token is not None
    return InductorGraph(traced, [inputs[i] for i in read], mode, aliases, draws, read, len(inputs), found)


def _type_of(node: Any) -> torch.dtype | None:
    meta = getattr(node, "meta", {})
    value = meta.get("val", meta.get("tensor_meta"))  # AOTAutograd takes the values of saved tensors away
    dtype = getattr(value, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _of_type(result: Any, dtype: torch.dtype | None) -> Any:
    return result if dtype is None or not isinstance(result, torch.Tensor) else result.to(dtype)


def _without_data(
    values: Sequence[Any], mode: Any, strides: Sequence[Strides | None], elsewhere: bool
) -> list[Any]:
    """The values with their tensors in a fake mode, the first ones with given strides; others as they are."""
    made = []
    for i, value in enumerate(values):
        other = strides[i] if i < len(strides) else None
        if not isinstance(value, torch.Tensor):
            made.append(value)
            continue
        device = DEVICE if elsewhere and value.device.type == "cpu" else value.device
        if elsewhere and value.device.type == "meta":  # a state of generators, which is on the host
            with mode:
                made.append(torch.empty(rng.generator_state_bytes("cuda"), dtype=value.dtype, device="cpu"))
        elif other is None or other == value.stride():
            made.append(fake.same_shape_in(mode, value, device))
        else:
            with mode:
                made.append(torch.empty_strided(value.shape, other, dtype=value.dtype, device=device))
    return made


def _strides(node: Any) -> Strides | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.stride() if isinstance(value, torch.Tensor) else None


def _is_sized_by_data(node: Node) -> bool:
    """Whether an operator finds the sizes of its results in data, even of constants."""
    if isinstance(node.kwargs.get("output_size"), int):  # the user tells the size
        return False
    indexes = (
        node.target is torch.ops.aten.index.Tensor
    )  # by masks sizes depend on data, by numbers they do not
    decided = operators.sized_by_data(node.target) and not indexes
    return decided or _is_sized_by_symbols(node.meta.get("val"))


def _is_sized_by_symbols(value: Any) -> bool:
    return fake.is_size(value) or (isinstance(value, torch.Tensor) and any(map(fake.is_size, value.shape)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _names(placeholders: Sequence[Node]) -> list[str]:
    """Names of the inputs in the program: they tell which inputs the program frees."""
    storages: dict[Any, int] = {}
    names = []
    for i, node in enumerate(placeholders):
        kept = node.name.startswith(("primals_", "tangents_"))
        value = node.meta.get("val")
        storage = fake.storage_key(value) if isinstance(value, torch.Tensor) else None
        number = i if storage is None else storages.setdefault(storage, i)
        names.append(f"{KEPT}{i}" if kept else f"{FREED}{number}_{i}")
    return names


def _without_unread(traced: GraphModule, names: Sequence[str]) -> list[int]:
    """Remove the inputs that a graph does not read, and name the others; returns the positions of these."""
    read = []
    for i, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        if node.users:
            node.name = node.target = names[i]
            read.append(i)
        else:
            traced.graph.erase_node(node)
    traced.recompile()
    return read


def _refuse(module: GraphModule) -> None:
    """Refuse a graph with operators that Inductor would run differently from the plan.

    Raises:
        CaptureError: It has one.
    """
    for node in (n for n in module.graph.nodes if n.op == "call_function"):
        runs_again = node.target is rng.run_from_state
        reserves = node.target is rnn_reserve.with_reserve
        target: Any = node.args[3] if runs_again else node.args[0] if reserves else node.target
        written = operators.writes(target) or operator_in_place(node) is not None
        writes = isinstance(target, OnCopy) or (operators.may_draw(target) and written)
        if reserves or writes:
            raise CaptureError(
                f"backend='inductor' cannot run {target}: it keeps a state, or draws in place; plan with "
                "backend='eager'"
            )


def _without_outputs(module: GraphModule, gone: Any) -> GraphModule:
    graph = FxGraph()
    copied: dict[Node, Node] = {}
    results = graph.graph_copy(module.graph, copied)
    graph.output([r for i, r in enumerate(results) if i not in gone])  # type: ignore[arg-type]
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "call_function" or n.target is not alias)
    return GraphModule(module, graph)


class _ForInductor(Interpreter):
    """Interprets a graph with the operators that Inductor is to see.

    Args:
        elsewhere: Whether the CPU that the graph names stands for a GPU that is not here.

    Attributes:
        token: The token for the next draw; None before the first.
    """

    token: Any = None

    def __init__(self, module: GraphModule, elsewhere: bool) -> None:
        super().__init__(module)
        self._elsewhere = elsewhere

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._elsewhere:
            args, kwargs = map_aggregate((args, kwargs), _on_gpu)
        if target is rng.generator_state:
            devices, index = self._generators(*args)
            size = rng.state_bytes(devices)
            reader = random_operators.saved_state(rng.generator_state, size, devices, index)
            state, self.token = reader(self._token())
            return state
        if target is rng.run_from_state:
            state, devices, index, operator, *rest = args
            devices, index = self._generators(devices, index)
            again = random_operators.from_state(operator, rng.run_from_state, devices, index)
            return again(state, *rest, **kwargs)
        if target is MASKED_PRODUCT:
            value, mask, keep = args
            return (mask.to(value.dtype) / keep) * value
        if (
            target in GIVEN_TENSORS
        ):  # Inductor has lowerings of PyTorch's operators, which read only the sizes
            gradient, sizes, *rest = args
            layout = memory_format(rest[-1])
            pooled = torch.empty(sizes, dtype=gradient.dtype, device=gradient.device, memory_format=layout)
            return GIVEN_TENSORS[target](gradient, pooled, *rest)
        if target in operators.SHAPE_VIEWS:  # the strides may be others than those that were traced
            return torch.ops.aten.reshape.default(*args, **kwargs)
        if operators.may_draw(target):
            *results, self.token = random_operators.in_order(target)(self._token(), *args, **kwargs)
            return results[0] if operators.returns_one(target) else tuple(results)
        return super().call_function(target, args, kwargs)

    def _generators(self, devices: str, index: int | None) -> tuple[str, int | None]:
        return (DEVICE.type, DEVICE.index) if self._elsewhere else (devices, index)

    def _token(self) -> Any:
        return random_operators.first_token() if self.token is None else self.token


def _on_gpu(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value


def as_given(function: BoxedFunction, graph: InductorGraph) -> BoxedFunction:
    """Wrap a function of Inductor's, so that it takes all inputs of the graph and returns all its outputs."""
    if not graph.aliases and not graph.draws and len(graph.read) == graph.given:
        return function

    def run(args: list[Any]) -> Sequence[Any]:
        taken = {i: alias(args[position]) for i, position in graph.aliases.items()}
        args[:] = [args[position] for position in graph.read]
        results = list(function(args))
        if graph.draws:
            results.pop()
        for i in sorted(taken):
            results.insert(i, taken[i])
        return results

    return run


def results_apart(function: BoxedFunction, results: Sequence[Any]) -> BoxedFunction:
    """Wrap a forward, so that it returns a tensor of its own for each result.

    Inductor makes no views such as ``detach``: it returns one tensor in place of several results. AOTAutograd
    marks some results as not differentiable, and would mark all that are the same tensor.

    Args:
        function: A function of Inductor's, with all outputs of the graph.
        results: The outputs in the graph. Outputs that are one node there stay one tensor.
    """
    first = {node: i for i, node in reversed(list(enumerate(results))) if isinstance(node, Node)}
    known: list[int] | None = None

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal known
        outputs = list(function(args))
        if known is None:  # a program returns the same tensor in the same places at each call
            owners: dict[int, Any] = {}
            for i, node in enumerate(results):
                if isinstance(outputs[i], torch.Tensor):
                    owners.setdefault(id(outputs[i]), node)
            known = [
                i
                for i, node in enumerate(results)
                if isinstance(outputs[i], torch.Tensor) and owners[id(outputs[i])] is not node
            ]
        for i in known:
            outputs[i] = alias(outputs[i]) if first[results[i]] == i else outputs[first[results[i]]]
        return outputs

    return run


class InductorLowering:
    """A :class:`planner.lowering.lowerings.Lowering` by Inductor.

    Args:
        options: Options of Inductor, as ``torch.compile(options=)`` takes them.
        fusion: Which fusions it allows, see :data:`planner._torch.inductor.fusion_names.Fusion`.
        gpu: The GPU to emit programs for, if it is not here: tensors on the CPU then stand for its own.

    Attributes:
        fusion: As given.
        digests: The digest of the first compiled program of each half.
    """

    def __init__(
        self, options: Mapping[str, Any], fusion: Fusion = "in-order", gpu: Gpu | None = None
    ) -> None:
        self._options = dict(options)
        self.fusion = fusion
        self._gpu = gpu
        self.digests: dict[Role, str] = {}
        self._results: Sequence[Strides | None] = ()  # strides of the results of the last lowered forward

    def __call__(self, module: GraphModule, role: Role) -> BoxedFunction:
        results: Sequence[Any] = module.graph.output_node().args[0]  # type: ignore[assignment]
        graph = self._graph(module, role)
        function, digest, strides = compiling.compiled(*self._arguments(graph), **self._keywords(role))
        self._returns(graph, role, strides)
        self.digests.setdefault(role, digest)
        given = as_given(function, graph)
        return given if role == "backward" else results_apart(given, results)

    def emitted(self, module: GraphModule, role: Role) -> tuple[compiling.Emitted, BoxedFunction, list[Any]]:
        """The program that Inductor emits for a graph, without compiling it.

        Returns:
            The program; the function that runs it without data, with the arguments and results of the
            compiled one; and arguments for that function.

        Raises:
            CaptureError: Inductor cannot lower it.
        """
        try:
            with lowered_for(self._gpu):
                graph = self._graph(module, role)
                program = compiling.emitted(*self._arguments(graph), **self._keywords(role))
            self._returns(graph, role, program.strides)
        except PlannerError:
            raise
        except Exception as error:  # whatever Inductor raises
            raise CaptureError(
                f"Inductor cannot lower the {role} of this step ({type(error).__name__}: {_line(error)}); "
                "plan with backend='eager'"
            ) from error
        values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        inputs = _without_data(values, graph.mode, self._saved(module, role), self._gpu is not None)
        return program, as_given(program.run, graph), inputs

    def _graph(self, module: GraphModule, role: Role) -> InductorGraph:
        return for_inductor(
            module,
            self._saved(module, role),
            in_order=self.fusion != "anywhere",
            elsewhere=self._gpu is not None,
        )

    def _returns(self, graph: InductorGraph, role: Role, found: Sequence[Strides | None]) -> None:
        """Note the strides of a forward's results: Inductor copies some views, in other strides."""
        if role == "forward":
            emitted = iter(found)
            self._results = [
                strides if i in graph.aliases else next(emitted, strides)
                for i, strides in enumerate(graph.strides)
            ]

    def _saved(self, module: GraphModule, role: Role) -> Sequence[Strides | None]:
        """The strides of the tensors that the forward saves, for its backward; none for a forward.

        Eager saves parts of larger tensors that it writes in place, with their strides. Inductor computes
        such parts as tensors of their own.
        """
        if role == "forward":
            return ()
        inputs = module.graph.find_nodes(op="placeholder")
        saved = sum(not node.name.startswith("tangents_") for node in inputs)
        return self._results[len(self._results) - saved :] if saved <= len(self._results) else ()

    def _arguments(self, graph: InductorGraph) -> tuple[GraphModule, Sequence[Any], Any]:
        return graph.module, graph.inputs, graph.mode

    def _keywords(self, role: Role) -> dict[str, Any]:
        return {"backward": role == "backward", "fusion": self.fusion, "options": self._options}
