"""What a model does only in its first forward does not keep it from its plan."""

import gc
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import planner
from planner.errors import PlanWarning
from planner.verification.measure import measure_peak
from tests.side_by_side import (
    AfterALayer,
    Layers,
    assert_same,
    counting_runs,
    exact_plan_of,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
)
from tests.zoo import build, scalar_loss

_LOCK = threading.Lock()


class Part(Layers):
    """Sets something up when it is first called, in the midst of its forward."""

    ready = False

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.set_up()
        return self.run(x)

    def set_up(self) -> None:
        if not self.ready:
            with _LOCK:
                self.layers[1].register_forward_hook(lambda _module, _args, output: output * 1.5)
                self.ready = True


class Cached(Part):
    """Makes a table when it is first called, and says so."""

    def set_up(self) -> None:
        if not self.ready:
            print("making a table")  # noqa: T201
            self.table = torch.linspace(0, 1, 32)
            self.ready = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x + self.table)


class Whole(nn.Module):
    """Calls such parts from inside a loop."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def _built(part: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = layers(lambda: Whole(part))
    return model, args


@pytest.mark.parametrize("part", [Part, Cached])
@pytest.mark.heavy
def test_the_plan_is_followed_from_the_second_step_on(part: Callable[[], nn.Module]) -> None:
    model, args = _built(part)
    plan = plan_of(model, args)
    assert any(graph.recomputed for graph in plan.graphs)
    fresh, twin = _built(part)[0], _built(part)[0]
    plan.apply(fresh)

    def step(network: nn.Module) -> torch.Tensor:
        network.zero_grad()
        loss: torch.Tensor = network(*args)
        loss.backward()
        return loss

    with counting_runs() as runs:
        with pytest.warns(PlanWarning, match=r"first forwards.*captured again.*torch.no_grad"):
            ours = left_by(fresh, step)
        assert_same(ours, left_by(twin, step))
        with no_plan_warnings():
            before = runs.captures
            assert_same(left_by(fresh, step), left_by(twin, step))
            assert runs.captures == before + 1
            measured = measure_peak(lambda: step(fresh), "cpu").peak_bytes
            assert runs.captures == before + 1
    assert measured <= plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_a_call_without_gradients_before_makes_the_first_step_follow_the_plan() -> None:
    model, args = _built(Part)
    plan = plan_of(model, args)
    fresh = _built(Part)[0]
    plan.apply(fresh)
    with no_plan_warnings(), counting_runs() as runs:
        with torch.no_grad():
            fresh(*args)
        fresh(*args).backward()
    assert (runs.captures, runs.backward) == (1, 1)


class Shared(nn.Module):
    """Uses values from before its setting up behind it too: two pieces add to the gradients of one tensor."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        p = self.often(h).tanh() + h.sin() * self.often(h).cos()
        if not self.ready:
            print("first forward")  # noqa: T201
            self.ready = True
        q = self.last(h).tanh() * h.sin() + self.often(h).tanh() * h.exp()
        return (p * q + (h * p).tanh()).square().mean()


class Codes(nn.Module):
    """Divides codes by how often they are used, and keeps the quotient from its first forward on."""

    quotient: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("sums", torch.rand(50, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quotient is None:
            self.quotient = self.sums / self.sums.sum(-1, keepdim=True)
        return (self.layer(x) @ self.quotient.T).square().mean()


def test_steps_after_the_first_are_predicted_without_what_that_one_made() -> None:
    exact_plan_of(Codes(), (torch.randn(16, 32),))


def test_gradients_that_pieces_of_a_first_forward_share_are_added_up_in_order() -> None:
    model, args, _ = layers(Shared)
    plan = plan_of(model, args)
    assert plan.coverage == "one-graph"
    fresh, twin = layers(Shared)[0], layers(Shared)[0]
    plan.apply(fresh)

    def step(network: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = network(*args)
        loss.backward()
        return loss

    with pytest.warns(PlanWarning, match="first forwards") as told:
        assert_same(left_by(fresh, step), left_by(twin, step))
    assert len(told) == 1


def _with_hidden_states() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = CLIPVisionModel(
        CLIPVisionConfig(image_size=8, patch_size=4, **sizes, attn_implementation="eager")
    )
    return model.train()


@pytest.mark.heavy
def test_hooks_that_transformers_puts_into_a_model_in_its_first_forward_are_there_before_it_is_traced() -> (
    None
):
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "output_hidden_states": True}

    def loss(output: Any) -> torch.Tensor:
        return sum((h * h.sin()).mean() for h in output.hidden_states)

    plan = plan_of(_with_hidden_states(), (), kwargs=inputs, loss=loss)
    planned, twin = _with_hidden_states(), _with_hidden_states()
    plan.apply(planned)

    def step(network: nn.Module) -> torch.Tensor:
        value = loss(network(**inputs))
        value.backward()
        return value

    with no_plan_warnings(), counting_runs() as runs:
        ours = left_by(planned, step)
        assert (runs.captures, runs.backward) == (1, 1)
    assert_same(ours, left_by(twin, step))
    # What Dynamo traces for others, it traces as before.
    compiled = torch.compile(_with_hidden_states(), backend="eager")
    torch.testing.assert_close(loss(compiled(**inputs)), loss(twin(**inputs)))


class Turns(Layers):
    """Goes another way once it is told to."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.broken:
            torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.heavy
def test_a_forward_that_always_goes_another_way_is_captured_anew_only_once() -> None:
    model, args, _ = layers(Turns)
    model.broken = False
    plan = plan_of(model, args)
    model.broken = True
    plan.apply(model)
    with warnings.catch_warnings(record=True) as reported, counting_runs() as runs:
        warnings.simplefilter("always", planner.PlanWarning)
        for _ in range(4):
            model(*args).backward()
    assert runs.captures == 4
    texts = [str(w.message) for w in reported]
    assert sum("first forwards" in text for text in texts) == 1
    assert sum("may exceed the budget" in text for text in texts) == 3


@pytest.mark.heavy
def test_a_forward_that_goes_another_way_later_is_not_captured_anew_and_not_said_to_be() -> None:
    model, args, _ = layers(Turns)
    plan_of(model, args).apply(model)
    with no_plan_warnings():
        model(*args).backward()
    model.broken = True
    with pytest.warns(PlanWarning, match="has not seen; of the operations that the plan re-runs"):
        model(*args).backward()


@pytest.mark.heavy
def test_another_number_of_inputs_is_named_as_the_reason() -> None:
    def step(model: nn.Module, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([model(part) for part in parts]).mean()

    model, *_ = layers(lambda: Layers(1))
    planned = planner.step(step, budget="min", solver="sqrt_n", costs="roofline", on_new_shape="reapply")
    parts = list(torch.ones(16, 32).split(4))
    with no_plan_warnings():
        planned(model, parts).backward()
    model.zero_grad()
    with pytest.warns(PlanWarning, match="as first forwards do .* more or fewer tensors"):
        planned(model, parts[:3]).backward()


@pytest.mark.parametrize("steps", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_forward_that_raised_is_not_what_runs_from_then_on(steps: int) -> None:
    def fail(_module: nn.Module, _args: Any) -> None:
        raise ValueError("the batch is not right")

    model, args, _ = layers()
    plan = plan_of(model, args)
    plan.apply(model)
    with counting_runs() as runs:
        for _ in range(steps):
            model(*args).backward()
        hook = model.layers[0][0].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="not right"):
            model(*args)
        hook.remove()
        model.zero_grad()
        model(*args).backward()
        assert runs.backward == steps + 1
    model.zero_grad()
    peak = measure_peak(lambda: model(*args).backward(), "cpu").peak_bytes
    assert peak <= plan.predicted.dynamic_peak_bytes


@pytest.mark.heavy
def test_what_is_captured_in_a_later_step_does_not_hold_what_its_callers_had() -> None:
    """Errors of Dynamo's own hold all frames, in rings that only the collector lets go of."""
    model, args, kwargs = build("hf_wav2vec2")
    model.config.layerdrop = 0.3
    scalar_loss(model(*args, **kwargs)).backward()  # what a first forward sets up
    model.zero_grad()
    torch.manual_seed(2)  # leaves out none
    plan = planner.plan(model, args, kwargs, budget="min", loss=scalar_loss, solver="sqrt_n")
    plan.apply(model)

    def garbage_at_its_end(seed: int) -> list[torch.Size]:
        torch.manual_seed(seed)
        loss = scalar_loss(model(*args, **kwargs))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        tensors = [o for o in gc.garbage if type(o) is torch.Tensor and o.device.type == "cpu"]
        found = [tensor.shape for tensor in tensors if tensor.dim() > 1]
        gc.garbage.clear()
        loss.backward()
        return found

    gc.collect()
    gc.disable()
    try:
        for seed in (2, 0, 1):
            assert not garbage_at_its_end(seed)
    finally:
        gc.enable()


class InAnObject(AfterALayer):
    """Its output is an object with the loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.work(x))

    def work(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x)
        return loss


def test_a_forward_of_which_nothing_is_captured_any_more_is_reported() -> None:
    model, x = InAnObject(torch.tanh), torch.randn(8, 64)
    planner.plan(model, x, budget="1GiB", backend="graph").apply(model)
    model.work = torch.compiler.disable(model.work)  # type: ignore[method-assign]
    with pytest.warns(PlanWarning, match="nothing of the planned forward could be captured"):
        model(x)
