"""Results that are written into operands that die: eager's bits, and nothing is written that is read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

import planner
from planner._torch.execution.sign_operators import MASK_GRADIENT, PACK_SIGNS
from planner._torch.fake import fake_mode
from planner.graph import dying_operands
from planner.graph.dying_operands import forget, write_into_dying_operands, writing
from planner.graph.joint_pass import AutocastContext, TraceContext
from planner.graph.passes.in_place_accumulation import is_sum_in_place, mark_sums_in_place
from planner.hooks.undefined_gradients import without_gradients
from planner.lowering.codegen import compile_graph, generate

aten = torch.ops.aten


def arguments(target: Any, dtype: torch.dtype, order: tuple[int, ...]) -> list[Any]:
    """Arguments for an operator, its tensors with dimensions in an order of memory."""

    def values() -> torch.Tensor:
        dense = torch.rand(3, 5, 37).to(dtype)
        return dense.permute(order).contiguous().permute([order.index(i) for i in range(3)])

    filled = {
        aten.where.self: [values() > 0.5, values(), values()],
        aten.pow.Tensor_Scalar: [values(), 3.0],
        aten.masked_fill.Scalar: [values(), values() > 0.5, -3.0],
        aten.masked_fill.Tensor: [values(), values() > 0.5, torch.tensor(0.7, dtype=dtype)],
        aten.threshold_backward.default: [values(), values(), 0.5],
        **{each: [values(), 1, False] for each in (aten._softmax.default, aten._log_softmax.default)},
        **{
            each: [values(), values(), 2, dtype]
            for each in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
        },
        aten.scatter.src: [values(), 1, torch.randint(0, 5, (3, 2, 37)), values()],
        aten.scatter.value: [values(), 1, torch.randint(0, 5, (3, 2, 37)), 0.3],
        aten.scatter_add.default: [values(), 1, torch.randint(0, 5, (3, 5, 37)), values()],
        aten.index_put.default: [values(), [None, torch.tensor([4, 1, 1])], values()[:, :3], True],
        aten.index_add.default: [values(), 1, torch.tensor([4, 1, 1]), values()[:, :3]],
        aten.index_copy.default: [values(), 1, torch.tensor([4, 1, 2]), values()[:, :3]],
        aten.masked_scatter.default: [values(), values() > 0.5, values()],
        aten.addmm.default: [torch.rand(n).to(dtype) for n in ((5, 37), (5, 7), (7, 37))],
        MASK_GRADIENT: [values(), PACK_SIGNS((torch.rand(3, 5, 37) - 0.5).relu())],
    }
    if target in filled:
        return filled[target]
    scalar = "Scalar" in str(target)
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    return [0.3 if scalar and a.type.kind() == "NumberType" else values() for a in required]


@pytest.mark.parametrize("target", dying_operands._WRITERS, ids=str)
def test_written_into_an_operand_a_result_has_the_same_bits(target: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for order in ((0, 1, 2), (2, 0, 1)):
            for position in dying_operands._WRITERS[target][0]:
                args = arguments(target, dtype, order)
                if position >= len(args) or not isinstance(args[position], torch.Tensor):
                    continue
                expected = target(*args)
                if expected.stride() != args[position].stride():
                    continue  # and so it is not written there
                node = FxGraph().call_function(target, tuple(args))
                node.meta[dying_operands._POSITION] = position
                call = writing(node)
                assert call is not None
                keywords = {} if call.keyword is None else {call.keyword: args[position]}
                found = call.operator(*args, **keywords)
                assert found is args[position]
                assert torch.equal(found, expected)
                assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 3, 33), (1020, 1000), (64, 8, 31), (3, 50257)], ids=str)
def test_a_softmax_in_place_reads_its_row_before_it_writes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Along the last dimension and others, which have kernels of their own, and over rows of odd lengths."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(shape).to(dtype) * 3 for _ in range(2))
    for name in ("_softmax", "_log_softmax"):
        forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward_data")
        for dim in range(len(shape)):
            result = forward(x, dim, False)
            written = x.clone()
            assert torch.equal(forward.out(written, dim, False, out=written), result)
            expected, over = backward(gradient, result, dim, dtype), gradient.clone()
            keyword = backward.out._schema.arguments[-1].name
            assert torch.equal(backward.out(over, result, dim, dtype, **{keyword: over}), expected)


Body = Callable[[FxGraph, Node, Node], Any]


def traced(body: Body, backward: bool) -> GraphModule:
    """A graph of two inputs of 4 x 8, all of it in the forward or in the backward."""
    graph = FxGraph()
    inputs = [graph.placeholder(name) for name in ("x", "y")]
    result = body(graph, *inputs)
    graph.output(tuple(result) if isinstance(result, list) else (result,))
    module = GraphModule(nn.Module(), graph)
    with fake_mode():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = torch.empty(4, 8)
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
                if backward:
                    node.meta["partitioner_tag"] = "is_backward"
            else:
                node.meta["desc"] = []
    return module


def call(graph: FxGraph, target: Any, *args: Any) -> Node:
    return graph.call_function(target, args)


@pytest.mark.parametrize("collective", [True, False])
def test_nothing_is_written_over_while_a_collective_reads_it(collective: bool) -> None:
    """It reads until its result is waited for, and that comes after its last reader here."""

    def gathered(graph: FxGraph, x: Node, y: Node) -> Any:
        product = call(graph, aten.mul.Tensor, x, y)
        functional = torch.ops._c10d_functional
        reader = (functional.all_gather_into_tensor.default, product, 2, "ranks")
        made = call(graph, *reader) if collective else call(graph, aten.cat.default, [product, product])
        bent = call(graph, aten.tanh.default, product)
        return [bent, call(graph, functional.wait_tensor.default, made) if collective else made]

    module = traced(gathered, backward=True)
    write_into_dying_operands(module)
    (bent,) = module.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert (writing(bent) is None) == collective


def chain(graph: FxGraph, x: Node, y: Node) -> Any:
    """All but the first can write into what the first makes, one of them through a view."""
    product = call(graph, aten.mul.Tensor, x, y)
    shifted = call(graph, aten.add.Tensor, product, 1.0)
    flat = call(graph, aten.view.default, shifted, [32])
    bent = call(graph, aten.tanh.default, flat)
    return call(graph, aten.sub.Tensor, call(graph, aten.view.default, bent, [4, 8]), x)


def second(graph: FxGraph, x: Node, y: Node) -> Any:
    return call(graph, aten.sub.Tensor, x, call(graph, aten.mul.Tensor, x, y))


def of_inputs(graph: FxGraph, x: Node, y: Node) -> Any:
    return call(graph, aten.add.Tensor, x, call(graph, aten.view.default, y, [4, 8]))


def read_later(graph: FxGraph, x: Node, y: Node) -> Any:
    product = call(graph, aten.mul.Tensor, x, y)
    bent = call(graph, aten.tanh.default, product)
    return [call(graph, aten.mm.default, bent, call(graph, aten.t.default, product))]


def returned_as_well(graph: FxGraph, x: Node, y: Node) -> Any:
    product = call(graph, aten.mul.Tensor, x, y)
    return [call(graph, aten.tanh.default, product), call(graph, aten.view.default, product, [32])]


def of_part(graph: FxGraph, x: Node, y: Node) -> Any:
    part = call(graph, aten.slice.Tensor, call(graph, aten.cat.default, [x, y]), 0, 0, 4)
    return call(graph, aten.tanh.default, part)


def of_other_form(graph: FxGraph, x: Node, y: Node) -> Any:
    wide = call(graph, aten.add.Tensor, call(graph, aten.sum.dim_IntList, x, [0], True), y)
    column = call(graph, aten.t.default, y)
    turned = call(
        graph, aten.t.default, call(graph, aten.mm.default, column, call(graph, aten.mm.default, x, column))
    )
    return [wide, call(graph, aten.add.Tensor, x, turned)]


def with_itself(graph: FxGraph, x: Node, y: Node) -> Any:
    product = call(graph, aten.mm.default, x, call(graph, aten.t.default, y))
    return call(graph, aten.add.Tensor, product, call(graph, aten.t.default, product))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("body", "count"),
    [(chain, 2), (second, 1), (of_inputs, 0), (read_later, 0), (returned_as_well, 0), (of_part, 0),
     (of_other_form, 0), (with_itself, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_only_what_dies_is_written_into(body: Body, count: int, backward: bool) -> None:
    module = traced(body, backward)
    x, y = torch.randn(2, 4, 8).unbind()
    before = x.clone(), y.clone()
    expected = module(x, y)
    write_into_dying_operands(module)
    # The last of the chain would return a view, to which users of a forward may not write.
    count += backward and body is chain
    assert sum(writing(n) is not None for n in module.graph.nodes) == count
    for found, wanted in zip(compile_graph(module, "f")([x, y]), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize(("name", "count"), [("x", 1), ("tangents_1", 0)])
def test_nothing_is_written_into_what_may_have_other_strides_than_traced(name: str, count: int) -> None:
    """Gradients arrive with any strides of dimensions of one element, as does what is computed of them."""
    graph = FxGraph()
    graph.output((call(graph, aten.exp.default, call(graph, aten.neg.default, graph.placeholder(name))),))
    module = GraphModule(nn.Module(), graph)
    with fake_mode():
        given, negated, result, _ = graph.nodes
        for node in (given, negated, result):
            node.meta |= {"val": torch.empty(1, 4, 8), "partitioner_tag": "is_backward"}
    module.graph.output_node().meta["desc"] = []
    write_into_dying_operands(module)
    assert sum(writing(n) is not None for n in module.graph.nodes) == count


def _of_much(graph: FxGraph, x: Node, y: Node) -> Node:
    """A product of 4 x 8 numbers that is computed of twice as many."""
    return call(graph, aten.mm.default, x, call(graph, aten.mm.default, call(graph, aten.t.default, x), y))


def _of_little(graph: FxGraph, x: Node, y: Node) -> Node:
    """A product of 4 x 8 numbers that is computed of half as many."""
    return call(graph, aten.mm.default, call(graph, aten.mm.default, x, call(graph, aten.t.default, y)), y)


def _of_unknown(graph: FxGraph, x: Node, y: Node) -> Node:
    """Computed of nothing but an input, by an operator that may take more memory while it runs."""
    return call(graph, aten.cumsum.default, y, 0)


@pytest.mark.parametrize(
    ("branch", "later", "count"),
    [(_of_little, False, 1), (_of_much, False, 0), (_of_unknown, False, 0), (_of_little, True, 0)],
)
def test_in_the_forward_a_residual_is_added_into_what_waits_for_it_at_no_cost(
    branch: Callable[[FxGraph, Node, Node], Node], later: bool, count: int
) -> None:
    """What the branch is computed of waits in its place: it is no larger. The residual is made before."""

    def body(graph: FxGraph, x: Node, y: Node) -> Any:
        if later:
            result = branch(graph, x, y)
        residual = call(graph, aten.cumsum.default, x, 0)
        if not later:
            result = branch(graph, x, y)
        return [call(graph, aten.add.Tensor, result, residual), residual]

    module = traced(body, backward=False)
    write_into_dying_operands(module)
    assert sum(writing(n) is not None for n in module.graph.nodes) == count
    x, y = torch.randn(2, 4, 8).unbind()
    for found, wanted in zip(compile_graph(module, "f")([x, y]), module(x, y), strict=True):
        assert torch.equal(found, wanted)


def test_in_the_forward_only_what_one_operation_reads_is_written_into() -> None:
    """What else is read of it may be computed again; what is computed again reads what was made before it;
    and users may write to what they get, which a view of a function of autograd's forbids."""

    def twice(graph: FxGraph, x: Node, y: Node) -> Any:
        product = call(graph, aten.mul.Tensor, x, y)
        total = call(graph, aten.sum.default, product)
        return [call(graph, aten.tanh.default, product), total]

    def of_two(graph: FxGraph, x: Node, y: Node) -> Any:
        return call(graph, aten.add.Tensor, _of_much(graph, x, y), _of_much(graph, y, x))

    def of_something_small_that_is_made_later(graph: FxGraph, x: Node, y: Node) -> Any:
        product = call(graph, aten.mul.Tensor, x, y)
        return call(graph, aten.add.Tensor, product, call(graph, aten.sum.default, x))

    def returned_through_a_view(graph: FxGraph, x: Node, y: Node) -> Any:
        square = call(graph, aten.mm.default, x, call(graph, aten.t.default, y))
        return call(graph, aten.neg.default, call(graph, aten.view.default, square, [2, 2, 4]))

    for body in (twice, of_two, of_something_small_that_is_made_later, returned_through_a_view):
        for backward in (False, True):
            module = traced(body, backward)
            write_into_dying_operands(module)
            assert sum(writing(n) is not None for n in module.graph.nodes) == int(backward), body


def test_without_a_gradient_nothing_is_written_into_what_is_left() -> None:
    def body(graph: FxGraph, x: Node, y: Node) -> Any:
        total = call(graph, aten.add.Tensor, call(graph, aten.mul.Tensor, x, 2.0), y)
        return [call(graph, aten.mul.Tensor, total, 3.0), call(graph, aten.mul.Tensor, y, 5.0)]

    module = traced(body, backward=True)
    write_into_dying_operands(module)
    assert [writing(n) is not None for n in module.graph.nodes].count(True) == 2
    # y is what is left of the sum, and is read once more.
    left = without_gradients(module, frozenset({0}), 2)
    y = torch.randn(4, 8)
    assert not any(writing(n) for n in left.graph.nodes)
    threefold, fivefold = compile_graph(left, "g")([torch.randn(4, 8), y.clone()])
    assert torch.equal(threefold, y * 3)
    assert torch.equal(fivefold, y * 5)


def _image(graph: FxGraph, tokens: Node) -> Node:
    return call(graph, aten.neg.default, call(graph, aten.view.default, tokens, [1, 4, 2, 4]))


def _sum_of(body: Callable[[FxGraph, Node, Node], Any]) -> Node:
    module = traced(body, backward=True)
    total = next(n for n in module.graph.nodes if n.target is aten.add.Tensor)
    mark_sums_in_place(module, TraceContext(module, (), AutocastContext.here()))
    write_into_dying_operands(module)
    return total


def test_a_sum_of_gradients_is_written_into_the_first_whatever_its_strides() -> None:
    def body(graph: FxGraph, x: Node, y: Node) -> Any:
        first = call(graph, aten.new_empty_strided.default, x, [1, 4, 2, 4], [1, 8, 4, 1])
        return call(graph, aten.add.Tensor, first, _image(graph, y))

    total = _sum_of(body)
    assert is_sum_in_place(total)
    call_of_sum = writing(total)
    assert call_of_sum is None or call_of_sum.position == 0


def test_nothing_is_added_in_place_to_a_view_nor_written_into_one_whose_strides_are_not_known() -> None:
    def body(graph: FxGraph, x: Node, y: Node) -> Any:
        first = call(graph, aten.as_strided.default, _image(graph, x), [1, 4, 2, 4], [1, 8, 4, 1])
        return call(graph, aten.add.Tensor, first, _image(graph, y))

    total = _sum_of(body)
    assert not is_sum_in_place(total)
    assert writing(total) is None


def test_code_is_written_with_the_operators_of_eager() -> None:
    module = traced(chain, backward=True)
    write_into_dying_operands(module)
    source, constants = generate(module.graph, module, "f")
    called = {getattr(value, "__name__", "") for value in constants.values()}
    assert {"add_", "tanh_"} <= called, source
    for node in module.graph.nodes:
        forget(node)
    _, constants = generate(module.graph, module, "f")
    assert not {"add_", "tanh_"} & {getattr(value, "__name__", "") for value in constants.values()}


class Bent(nn.Module):
    """Layers of elementwise functions, whose gradients come together in sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            wide = layer(x) / 3
            x = x + self.drop(0.5 * wide * (1 + torch.tanh(0.8 * (wide + 0.04 * wide.pow(3)))))
        return x.square().mean()


@pytest.mark.heavy
@pytest.mark.parametrize("budget", ["1TiB", "min"])
def test_predicted_is_measured_and_gradients_are_eagers(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Bent().train(), torch.randn(32, 24, requires_grad=True)
    plan = planner.plan(model, (x,), budget=budget, solver="none" if budget == "1TiB" else "sqrt_n")
    again = {plan.graphs[0].ops[i].name for i in plan.graphs[0].recomputed}
    assert (budget == "min") == bool(again)
    report = planner.verify(copy.deepcopy(model), (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


@pytest.mark.graphs
@pytest.mark.parametrize("kind", ["addmm", "index_add"])
def test_what_is_read_elsewhere_too_is_not_written_over(kind: str) -> None:
    class GivenTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(300, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            at = torch.arange(300).flip(0)
            h = torch.addmm(h, x, h) if kind == "addmm" else h.index_add(0, at, h)
            return (h * 0.01).sin().square().mean()

    torch.manual_seed(0)
    model, x = GivenTwice(), torch.randn(300, 300)
    twin = copy.deepcopy(model)
    planner.plan(model, (x,), budget="min", costs="roofline").apply(model)
    for one in (model, twin):
        one(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
