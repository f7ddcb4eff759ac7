"""Views that change nothing are left out of emitted graphs."""

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._torch.execution import op_bindings
from planner.lowering.codegen import compile_graph, generate
from planner.lowering.view_elimination import simplify
from tests.side_by_side import exact_plan_of, no_plan_warnings

aten = torch.ops.aten


class Built:
    """A graph whose nodes know their values, as traced ones do."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs = [self._placeholder(i, x) for i, x in enumerate(inputs)]

    def _placeholder(self, index: int, tensor: torch.Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{index}")
        node.meta["val"] = self.mode.from_tensor(tensor)
        return node

    def call(self, operator, *args, **kwargs):  # type: ignore[no-untyped-def]
        node = self.graph.call_function(operator, args, kwargs)
        with self.mode:
            node.meta["val"] = operator(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def targets(self) -> list[str]:
        return [str(n.target).removeprefix("aten.") for n in self.graph.nodes if n.op == "call_function"]


def test_views_that_undo_each_other_go() -> None:
    built = Built(torch.randn(2, 3, 4), torch.randn(4, 3))
    x, w = built.inputs
    flat = built.call(aten.view.default, built.call(aten.view.default, x, [3, 8]), [6, 4])
    twice = built.call(aten.t.default, built.call(aten.t.default, w))
    same = built.call(aten.expand.default, built.call(aten.detach.default, twice), [4, 3])
    moved = built.call(aten.transpose.int, built.call(aten.transpose.int, x, 1, 2), 0, 2)
    built.graph.output([built.call(aten.mm.default, flat, same), built.call(aten.sin.default, moved)])
    plain = torch.fx.GraphModule(torch.nn.Module(), built.graph)
    inputs = torch.randn(2, 3, 4), torch.randn(4, 3)
    expected = plain(*inputs)
    simplify(built.graph, 0)
    assert built.targets() == ["view.default", "permute.default", "mm.default", "sin.default"]
    found = compile_graph(plain, "forward")(list(inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_steps_of_single_elements_stay_as_they_are() -> None:
    """BLAS chooses what it runs by them, and so the last bits."""
    sizes = {"one view": [[4, 1, 6]], "two views": [[4, 6], [4, 1, 6]], "at the end": [[4, 6, 1], [4, 6, 1]]}
    for name, shapes in sizes.items():
        built = Built(torch.randn(4, 6, 1))
        seen = built.call(aten.permute.default, built.inputs[0], [0, 2, 1])
        for shape in shapes:
            seen = built.call(aten.view.default, seen, shape)
        built.graph.output([seen])
        plain = torch.fx.GraphModule(torch.nn.Module(), built.graph)
        (expected,) = plain(torch.randn(4, 6, 1))
        (found,) = compile_graph(plain, "forward", fixed_outputs=0)([torch.randn(4, 6, 1)])
        assert found.stride() == expected.stride(), name


def test_views_of_what_the_backward_needs_are_looked_through() -> None:
    """AOTAutograd is not told the value of what is saved, lest it gives its memory away."""

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.mix(x) + x
            seen = kept.view(4, 4, 6).view(1, 96)
            return kept.sin().sum() + self.mix(seen.view(4, 24)).sum() + seen.tanh().sum()

    with no_plan_warnings():
        exact_plan_of(Saved(), (torch.randn(4, 24),), budget="100%", solver="auto")


def test_a_slice_of_every_second_element_of_one_is_taken() -> None:
    built = Built(torch.randn(4, 1))
    made = built.call(aten.sin.default, built.inputs[0])
    built.graph.output([built.call(aten.slice.Tensor, made, 1, 0, 9, 2)])
    plain = torch.fx.GraphModule(torch.nn.Module(), built.graph)
    (expected,) = plain(torch.randn(4, 1))
    (found,) = compile_graph(plain, "forward", fixed_outputs=0)([torch.randn(4, 1)])
    assert found.stride() == expected.stride()


def test_no_tensor_is_returned_twice_and_the_users_outputs_stay() -> None:
    built = Built(torch.randn(3))
    (x,) = built.inputs
    y = built.call(aten.sin.default, x)
    first, second = built.call(aten.detach.default, y), built.call(aten.detach.default, y)
    built.graph.output([first, second])
    simplify(built.graph, 0)
    assert built.targets() == ["sin.default", "detach.default"]
    built = Built(torch.randn(3))
    built.graph.output([built.call(aten.detach.default, built.call(aten.sin.default, built.inputs[0]))])
    simplify(built.graph, 1)
    assert built.targets() == ["sin.default", "detach.default"]


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "binding"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(2)), {"alpha": 2}, torch.add),
        (aten.add.Tensor, (torch.ones(2), 1), {}, torch.add),
        (aten.sum.dim_IntList, (torch.ones(2, 2), [0], True), {}, torch.sum),
        (aten.expand.default, (torch.ones(2), (3, 2)), {}, torch._C.TensorBase.expand),
        (aten._to_copy.default, (torch.ones(2),), {"dtype": torch.float64}, None),
        (aten.native_dropout_backward.default, (torch.ones(2), torch.ones(2) > 0, 2.0), {}, None),
        (aten.arange.default, (3,), {"device": "cpu"}, None),  # torch.arange asks for a default device
        (aten.dropout.default, (torch.ones(2), 0.5, True), {}, None),  # another operator arrives
    ],
)
def test_a_binding_is_taken_where_the_same_operator_arrives(operator, args, kwargs, binding) -> None:  # type: ignore[no-untyped-def]
    found = op_bindings.python_binding(operator, args, kwargs)
    assert found == binding


def test_asking_for_a_binding_runs_nothing() -> None:
    before, x = torch.get_rng_state(), torch.ones(2)
    assert op_bindings.python_binding(aten.native_dropout.default, (x, 0.5, True), {}) is torch.native_dropout
    assert op_bindings.python_binding(aten.add_.Tensor, (x, 1.0), {}) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, torch.ones(2))


def test_generated_code_makes_no_lists_where_tuples_do() -> None:
    built = Built(torch.randn(2, 3))
    built.graph.output([built.call(aten.sum.dim_IntList, built.inputs[0], [0], True)])
    module = torch.fx.GraphModule(torch.nn.Module(), built.graph)
    source, constants = generate(built.graph, module, "forward")
    assert "(0, )" in source
    assert torch.sum in constants.values()
