"""What follows from sizes and constants alone does not end a graph that Inductor runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers

import planner
from planner._torch.dynamo import dynamo_compile, dynamo_settings


def positions(x: torch.Tensor) -> torch.Tensor:
    """As models make them."""
    return torch.arange(x.shape[1]).unsqueeze(0)


def packed(x: torch.Tensor) -> torch.Tensor:
    steps = torch.diff(positions(x), prepend=positions(x)[:, :1] - 1, dim=-1)
    if ((steps != 1).cumsum(-1)[:, -1] == 0).all():
        return x * 2
    return x * 3


def either(x: torch.Tensor) -> torch.Tensor:
    long = positions(x).max() > 3
    chosen = long or x.shape[0] > 100
    return x * 2 if isinstance(chosen, torch.Tensor) else x * 3


def number(x: torch.Tensor) -> torch.Tensor:
    return x * positions(x).sum().item()


def as_int(x: torch.Tensor) -> torch.Tensor:
    return x[:, : int(positions(x).max())]


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert (positions(x) >= 0).all()
    return x * 2


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (x > 0).all() else x * 3


def of_a_changed_one(x: torch.Tensor) -> torch.Tensor:
    found = positions(x).clone()
    found[0, 0] = 5
    return x * 2 if (found < 5).all() else x * 3


def of_one_changed_behind(x: torch.Tensor) -> torch.Tensor:
    found = positions(x).clone()
    found.data[0, 0] = 9
    return x * 2 if (found < 7).all() else x * 3


def of_one_changed_with_others(x: torch.Tensor) -> torch.Tensor:
    found = positions(x).clone()
    torch._foreach_add_([found], 9)
    return x * 2 if (found < 7).all() else x * 3


def of_one_given_to_write_to(x: torch.Tensor) -> torch.Tensor:
    found = positions(x).clone()
    torch.add(found, 9, out=found)
    return x * 2 if (found < 7).all() else x * 3


def of_one_that_is_told_to_change(x: torch.Tensor) -> torch.Tensor:
    found = positions(x) - 3
    torch.nn.functional.relu(found.data, inplace=True)
    return x * 2 if (found >= 0).all() else x * 3


def of_one_that_an_argument_tells_to_change(x: torch.Tensor) -> torch.Tensor:
    found = positions(x) - 3
    torch.nn.functional.hardtanh(found.data, 0, 2, True)
    return x * 2 if (found >= 0).all() else x * 3


REMEMBERED = [0]
"""What an operator and a function of a user's remember."""


@torch.library.custom_op("planner_tests::remembered", mutates_args=())
def remembered(size: int) -> torch.Tensor:
    """Nothing that it is given decides what it returns."""
    return torch.full((size,), REMEMBERED[0])


@remembered.register_fake
def _(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64)


def of_what_an_operator_remembers(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (remembered(x.shape[1]) > 0).all() else x * 3


@torch.compiler.allow_in_graph
def told(size: int) -> torch.Tensor:
    """As above, for a function that Dynamo does not look into."""
    return torch.full((size,), REMEMBERED[0])


def of_what_a_function_remembers(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (told(x.shape[1]) > 0).all() else x * 3


def of_one_that_a_view_changed(x: torch.Tensor) -> torch.Tensor:
    found = positions(x).clone()
    found.detach()[:, 1:].add_(9)
    return x * 2 if (found < 7).all() else x * 3


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (torch.randint(0, 2, (1,)) == 0).all() else x * 3


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (torch.arange(x.shape[1]).sqrt() < 9).all() else x * 3


def graphs_of(function: Callable[[torch.Tensor], torch.Tensor], *inputs: torch.Tensor, decided: bool) -> int:
    """In how many graphs a function is captured; its results are compared with its own."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with dynamo_settings():
        compiled = dynamo_compile(function, backend, decided=decided, unbroken=lambda: True)
        for x in inputs:
            for _ in range(2):
                torch.manual_seed(0)
                expected = function(x)
                torch.manual_seed(0)
                assert torch.equal(compiled(x), expected)
    return len(graphs)


@pytest.mark.parametrize("function", [packed, either, number, as_int])
def test_a_value_of_sizes_is_known(function: Any) -> None:
    x = torch.rand(2, 6)
    assert graphs_of(function, x, decided=True) == 1
    with pytest.raises(planner.CaptureError, match="too many graphs"):
        graphs_of(function, x, decided=False)


def test_an_assertion_on_sizes_is_no_operation() -> None:
    assert graphs_of(asserted, torch.rand(2, 6), decided=True) == 1


@pytest.mark.parametrize(
    "function",
    [
        of_an_input,
        of_a_changed_one,
        of_one_changed_behind,
        of_one_changed_with_others,
        of_one_given_to_write_to,
        of_one_that_is_told_to_change,
        of_one_that_an_argument_tells_to_change,
        of_what_an_operator_remembers,
        of_what_a_function_remembers,
        of_one_that_a_view_changed,
        drawn,
        rounded,
    ],
)
def test_what_may_be_otherwise_is_read(function: Any) -> None:
    with pytest.raises(planner.CaptureError, match="too many graphs"):
        graphs_of(function, torch.rand(2, 6), decided=True)


def test_a_check_that_fails_leaves_the_error_to_eager() -> None:
    def short(x: torch.Tensor) -> torch.Tensor:
        if not (positions(x) < 3).all():
            raise ValueError("too long")
        return x * 2

    whole = dynamo_compile(short, lambda graph, _: graph.forward, decided=True, unbroken=lambda: True)
    with dynamo_settings(), pytest.raises(planner.CaptureError, match="too many graphs"):
        whole(torch.rand(2, 6))


def test_other_sizes_are_decided_by_themselves() -> None:
    def longer_than_four(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (positions(x) > 3).any() else x * 3

    assert (
        graphs_of(longer_than_four, torch.rand(2, 6), torch.rand(2, 4), torch.rand(2, 8), decided=True) == 3
    )


class Decoder(nn.Module):
    """A small Llama that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
        )
        self.inside = transformers.LlamaForCausalLM(config)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inside(input_ids=words, labels=words, use_cache=False).loss
        return loss


class LooksUnlessCompiled(nn.Module):
    """Skips a mask that masks nothing, unless it is compiled: then it does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.inside(x)
        if torch.compiler.is_compiling() or not (mask * x.detach().abs() > 0).all():
            hidden = hidden * mask
        return hidden.square().mean()


def test_who_asks_whether_it_is_compiled_is_told_so_for_inductor() -> None:
    inputs = torch.randn(4, 8), torch.ones(4, 8)
    compiled = planner.prepare(LooksUnlessCompiled(), inputs, backend="inductor")._prepared.captured
    assert len(compiled.graphs) == 1
    assert "mul" in " ".join(op.name for op in compiled.graphs[0].joint.ops)
    assert len(planner.prepare(LooksUnlessCompiled(), inputs)._prepared.captured.graphs) > 1


@pytest.mark.heavy
def test_a_decoder_is_one_graph_for_inductor_and_trained_right_at_other_lengths() -> None:
    torch.manual_seed(0)
    model, words = Decoder().train(), torch.randint(0, 64, (4, 32))
    unplanned = copy.deepcopy(model)
    assert planner.plan(model, words, budget="min", solver="sqrt_n").coverage == "several-graphs"
    plan = planner.plan(model, words, budget="100%", backend="inductor", solver="sqrt_n")
    assert len(plan.graphs) == 1
    plan.apply(model)
    for length in (32, 20):
        given = words[:, :length].contiguous()
        for each in (model, unplanned):
            each.zero_grad()
            each(given).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, unplanned.get_parameter(name).grad)
