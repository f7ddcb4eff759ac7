"""Steps that train without the plan say so; those that libraries compile run by it."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import planner
from planner.errors import PlanMismatch, PlanWarning
from planner.runtime.install import installed_plan
from planner.user_plan import Plan
from tests.side_by_side import (
    AfterALayer,
    Layers,
    assert_same,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
)

pytestmark = pytest.mark.heavy


class Two(Layers):
    """Two residual layers."""

    def __init__(self) -> None:
        super().__init__(2)


def _built() -> tuple[nn.Module, tuple[torch.Tensor]]:
    model, args, _ = layers(Two)
    return model, args


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, args = _built()
    return plan_of(model, args)


def _warnings_of(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        act()
    return [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]


# ---- modes -------------------------------------------------------------------------------------------


def test_a_model_in_evaluation_mode_is_planned_for_training_which_is_said(plan: Plan) -> None:
    model, args = _built()
    model.eval()
    with pytest.warns(PlanWarning, match=r"evaluation mode.*planned for training.*model\.train\(\)"):
        made = plan_of(model, args)
    assert not any(part.training for part in model.modules())
    assert made.model.training
    assert any("model.train()" in note for note in made.notes)
    assert made.graphs == plan.graphs


def test_a_model_can_be_planned_for_evaluation_mode() -> None:
    model, args = _built()
    with no_plan_warnings():
        made = plan_of(model, args, training=False)
    assert not made.model.training
    assert all(part.training for part in model.modules())
    assert not any("dropout" in op.name for graph in made.graphs for op in graph.ops)
    twin = copy.deepcopy(model.eval())
    made.apply(model)

    def step(network: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = network(*args)
        loss.backward()
        return loss

    with counting_runs() as runs, no_plan_warnings():
        assert_same(left_by(model, step), left_by(twin, step))
    assert runs.backward == 1


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_step_in_another_mode_than_planned_is_reported_once(plan: Plan, trained_before: bool) -> None:
    model, args = _built()
    plan.apply(model)
    if trained_before:
        model(*args).backward()
    model.eval()
    assert _warnings_of(lambda: model(*args)) == []  # may be an evaluation

    def steps() -> None:
        for _ in range(2):
            model(*args).backward()

    (text,) = _warnings_of(steps)
    assert "trains in evaluation mode" in text
    assert "model.train()" in text


def test_verify_in_another_mode_says_what_to_do(plan: Plan) -> None:
    model, args = _built()
    with pytest.raises(PlanMismatch, match=r"model\.train\(\) first"):
        planner.verify(model.eval(), args, plan=plan)


# ---- modules that are not called -----------------------------------------------------------------------


class Lit(nn.Module):
    """Trains by calling a part of itself, as modules of trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x)
        return loss

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x)
        return loss


def test_a_planned_module_of_which_only_a_part_is_called() -> None:
    model, args, _ = layers(Lit)
    plan_of(model, args).apply(model)
    (text,) = _warnings_of(lambda: [model.training_step(*args).backward() for _ in range(2)])  # type: ignore[operator]
    assert "its plan has not run" in text
    assert "self.net" in text


def test_calling_forward_itself(plan: Plan) -> None:
    model, args = _built()
    plan.apply(model)
    (text,) = _warnings_of(lambda: [model.forward(*args).backward() for _ in range(2)])
    assert "not model.forward(x)" in text


def test_nothing_is_said_where_there_is_nothing_to_say(plan: Plan) -> None:
    model, args = _built()
    plan.apply(model)
    with no_plan_warnings():
        planner.verify(model, args, repeats=0)
        model.eval()(*args)
        model.train()
        model(*args).backward()
        model.forward(*args).backward()
        assert planner.remove(model) is model
        model(*args).backward()
    plan.apply(model)
    with no_plan_warnings():
        planner.remove(model)
        model(*args).backward()
        again = copy.deepcopy(plan.apply(model))
        again(*args).backward()
    with pytest.warns(PlanWarning, match="its plan has not run"):
        model.forward(*args).backward()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# ---- torch.compile -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def part_plan() -> Plan:
    model, (x,) = _built()
    return plan_of(model, (x.clone().requires_grad_(),))


class Outer(nn.Module):
    """Calls a planned part between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(32, 32), Two(), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(self.before(x).tanh())
        return self.after(y.reshape(1)).square().mean()


def _compiled_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _compiled_in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return model


def test_compiling_a_planned_module_runs_the_plan(plan: Plan) -> None:
    model, args = _built()
    twin = copy.deepcopy(model)
    plan.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        compiled = _compiled_whole(model)

        def step(network: Any) -> torch.Tensor:
            loss: torch.Tensor = (compiled if network is model else twin)(*args)
            loss.backward()
            return loss

        assert_same(left_by(model, step), left_by(twin, step))
        model.zero_grad(), twin.zero_grad()
        assert_same(left_by(model, step), left_by(twin, step))
    assert runs.backward == 2


@pytest.mark.parametrize("compile_", [_compiled_whole, _compiled_in_place])
def test_compiling_what_a_planned_module_is_in_runs_the_plan(
    part_plan: Plan, compile_: Callable[[nn.Module], Any]
) -> None:
    model, args, _ = layers(Outer)
    part_plan.apply(model.part)  # type: ignore[arg-type]
    with counting_runs() as runs, no_plan_warnings():
        compiled = compile_(model)
        compiled(*args).backward()
        compiled(*args).backward()
    assert runs.backward == 2


def test_a_planned_part_of_a_planned_module_runs_by_the_outer_plan(part_plan: Plan) -> None:
    model, args, _ = layers(Outer)
    part_plan.apply(model.part)  # type: ignore[arg-type]
    made = plan_of(model, args)
    assert made.coverage == "one-graph"
    made.apply(model)
    with counting_runs() as runs, no_plan_warnings():
        model(*args).backward()
    assert (runs.captures, runs.backward) == (1, 1)


def test_compiling_in_one_graph_says_what_to_do(part_plan: Plan) -> None:
    model, args, _ = layers(Outer)
    part_plan.apply(model.part)  # type: ignore[arg-type]
    torch.compiler.reset()  # modules of the same class share what is compiled
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph=True out"):
        compiled(*args)


def test_compiling_in_place_after_planning_is_reported(plan: Plan) -> None:
    model, _ = _built()
    plan.apply(model)
    (text,) = _warnings_of(lambda: _compiled_in_place(model))
    assert "trains without its plan" in text
    assert "after model.compile()" in text
    assert installed_plan(model) is None


def test_planning_after_compiling_in_place_is_reported_and_runs_the_plan(plan: Plan) -> None:
    model, args = _built()
    compiled = _compiled_in_place(model)._compiled_call_impl
    (text,) = _warnings_of(lambda: plan.apply(model))
    assert "model.compile() was called before" in text
    with counting_runs() as runs, no_plan_warnings():
        model(*args).backward()
        assert plan_of(model, args).graphs == plan.graphs
    assert runs.backward == 1
    planner.remove(model)
    assert model._compiled_call_impl is compiled


def test_a_compiled_module_is_refused_with_what_to_do(plan: Plan) -> None:
    model, args = _built()
    compiled = _compiled_whole(model)
    for act in (lambda: plan_of(compiled, args), lambda: plan.apply(compiled)):
        with pytest.raises(PlanMismatch, match=r"_orig_mod"):
            act()


# ---- memory that is not predicted ------------------------------------------------------------------------


def _two_calls(model: nn.Module, x: torch.Tensor) -> None:
    (model(x) + model(x)).backward()


def _retained(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def _transposed(model: nn.Module, x: torch.Tensor) -> None:
    model(x.t().contiguous().t()).backward()


def _differentiated(model: nn.Module, x: torch.Tensor) -> None:
    model(x.clone().requires_grad_()).backward()


@pytest.mark.parametrize(
    ("step", "what", "remedy"),
    [
        (_two_calls, "awaits its backward", "make them one batch"),
        (_retained, "retain_graph=True", "call backward once"),
        (_transposed, r"has other strides than planned", ".contiguous()"),
        (_differentiated, "requires a gradient, and did not when", "Plan with inputs that require gradients"),
    ],
)
def test_what_takes_more_than_predicted_is_reported_once(
    plan: Plan, step: Callable[[nn.Module, torch.Tensor], None], what: str, remedy: str
) -> None:
    model, (x,) = _built()
    plan.apply(model)
    kept = []

    def as_planned() -> None:
        for _ in range(2):
            kept.append(model(x))  # a loss that was differentiated may be held
            kept[-1].backward()
            model.zero_grad()
        model(x)
        model(x).backward()  # what is let go of does not wait

    assert _warnings_of(as_planned) == []
    texts = [text for text in _warnings_of(lambda: [step(model, x) for _ in range(2)]) if what in text]
    assert len(texts) == 1
    assert remedy in texts[0]


def test_an_input_that_lies_as_planned_is_not_warned_of() -> None:
    model, (x,) = _built()
    transposed = x.t().contiguous().t()
    made = plan_of(model, (transposed,))
    assert made.model.inputs[0].strides == [1, 64]
    made.apply(model)
    assert _warnings_of(lambda: model(transposed).backward()) == []


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp_of_a_planned_module(plan: Plan, original: bool) -> None:
    model, args = _built()
    plan.apply(model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    with counting_runs() as runs:
        texts = _warnings_of(lambda: [(wrapped(*args).backward(), wrapped.zero_grad()) for _ in range(2)])
    assert runs.backward == (2 if original else 0)
    assert [("use_orig_params=True" in text) for text in texts] == ([] if original else [True])
    for act in (lambda: plan_of(wrapped, args), lambda: plan.apply(wrapped)):
        with pytest.raises(PlanMismatch, match=r"FullyShardedDataParallel.*use_orig_params=True"):
            act()


@pytest.mark.usefixtures("process_group")
def test_sharded_parameters_are_warned_of(plan: Plan) -> None:
    model, args = _built()
    plan.apply(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert any("DTensors" in text for text in _warnings_of(lambda: model(*args).backward()))
    for act in (lambda: plan_of(model, args), lambda: plan.apply(model)):
        with pytest.raises(PlanMismatch, match="before it is sharded"):
            act()


# ---- several plans -----------------------------------------------------------------------------------


def test_a_part_that_is_planned_later_runs_by_the_plan_of_the_whole(plan: Plan) -> None:
    model, args = _built()
    part = model.get_submodule("layers.0")
    of_part = plan_of(part, args, loss=torch.sum)
    plan.apply(model)
    of_part.apply(part)
    with counting_runs() as runs, no_plan_warnings():
        model(*args).backward()
        model(*args).backward()
        part(*args).sum().backward()
    assert runs.backward == 3


def test_a_weight_that_two_plans_share_says_nothing_of_the_one_that_has_not_run(plan: Plan) -> None:
    (model, args), (other, _) = _built(), _built()
    other.get_submodule("layers.0.0").weight = model.get_submodule("layers.0.0").weight
    for each in (model, other):
        plan.apply(each)
    with no_plan_warnings():
        model(*args).backward()
    with pytest.warns(PlanWarning, match="its plan has not run"):
        other.forward(*args).backward()


def test_a_copy_of_a_planned_model_that_failed_on_the_way_is_no_other_plan(plan: Plan) -> None:
    broken, args = _built()
    plan.apply(broken)
    broken.numbers = (number for number in range(3))  # cannot be copied
    with pytest.raises(TypeError) as failed:
        copy.deepcopy(broken)
    model, _ = _built()
    plan.apply(model)
    (text,) = _warnings_of(lambda: model.forward(*args).backward())
    assert "not model.forward(x)" in text
    assert failed.value.__traceback__ is not None  # it holds the half of a copy that there is


def test_a_shorter_part_of_a_batch_lies_as_planned_and_every_other_row_does_not() -> None:
    model, whole = AfterALayer(torch.tanh), torch.randn(6, 5, 64)
    planner.plan(model, (whole[:, :-1],), budget="1GiB").apply(model)
    assert _warnings_of(lambda: model(whole[:4, :3])) == []
    assert _warnings_of(lambda: model(whole[:, :4].contiguous()[:, :3])) == []
    (text,) = _warnings_of(lambda: model(whole[:, ::2]))
    assert "has other strides than planned ((320, 128, 1))" in text
