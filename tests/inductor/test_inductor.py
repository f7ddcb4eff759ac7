"""A plan that Inductor runs: what is drawn, what is computed, and what it takes."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from torch._inductor import cpu_vec_isa

import planner
from planner._torch.inductor import compiling
from planner.errors import CaptureError, CompilerError, InfeasibleBudget, PlannerError, PlanWarning
from planner.lazy.cached import mismatch
from planner.lowering.inductor import InductorLowering
from planner.planning.inductor import emitted_model
from planner.planning.options import OptionError
from planner.training_step.step import Step
from solvers import portfolio
from solvers.model.schedule import simulate


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(self.drop(torch.nn.functional.gelu(self.widen(self.norm(x))))))


class Net(nn.Module):
    """A few of them, and a loss."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def built() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().train(), torch.randn(64, 16)


def left(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of a step from a seed, and the generator's state after it."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()


@pytest.fixture(scope="module")
def again() -> tuple[Net, torch.Tensor, planner.Plan]:
    """A plan that draws masks again."""
    model, x = built()
    plan = planner.plan(
        model, x, budget="1GiB", backend="inductor", solver="sqrt_n", recompute=["planner.draw_mask"]
    )
    return model, x, plan


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_masks_are_drawn_again_as_eager_drew_them(again: tuple[Net, torch.Tensor, planner.Plan]) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    graph = plan.graphs[0]
    assert any("draw_mask" in graph.ops[i].name for i in graph.recomputed)
    expected, state = left(model, x)
    found, after = left(plan.apply(model), x)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert torch.equal(state, after)


@pytest.mark.usefixtures("interpreted")
def test_other_programs_than_planned_are_told(again: tuple[Net, torch.Tensor, planner.Plan]) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    assert all(len(g.emitted) == 2 for g in plan.graphs)
    with pytest.warns(PlanWarning, match="Inductor emits other programs"):
        left(plan.apply(model), x)


@pytest.mark.usefixtures("interpreted")
def test_of_other_operations_than_planned_that_is_told_alone(
    again: tuple[Net, torch.Tensor, planner.Plan],
) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        plan.apply(model)(x).backward()
    (told,) = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    assert "autocast off then, cpu:bfloat16 now" in told


def test_draws_are_measured_as_others_are(again: tuple[Net, torch.Tensor, planner.Plan]) -> None:
    assert not any("could not be measured" in note for note in again[2].notes)


class Noise(nn.Module):
    """Draws by an operator one of whose arguments is called ``from``."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inside(x) * torch.empty_like(x).uniform_(-1, 2)).square().mean()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_an_argument_may_be_called_like_a_word_of_the_language() -> None:
    model, x = Noise(), torch.randn(64, 16)
    expected, state = left(model, x)
    plan = planner.plan(model, x, budget="1GiB", backend="inductor", solver="sqrt_n")
    found, after = left(plan.apply(model), x)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert torch.equal(state, after)


class BesideItself(nn.Module):
    """Returns its loss, and what that is computed from detached and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.first(x).tanh()
        return self.last(y).square().mean(), y.detach(), y


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_the_gradient_of_a_result_is_there_beside_the_same_that_is_not_differentiated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = BesideItself(), torch.randn(64, 16)
    expected = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    plan = planner.plan(model, x, loss=loss_of, budget="1GiB", backend="inductor", solver="sqrt_n")
    original = compiling.compiled

    def without_aliases(*args: Any, **kwargs: Any) -> tuple[Any, str, list[Any]]:
        run, digest, strides = original(*args, **kwargs)

        def as_inductor(taken: list[Any]) -> list[Any]:
            there: dict[Any, Any] = {}
            return [
                t if t is None else there.setdefault((t.data_ptr(), t.shape, t.stride()), t)
                for t in run(taken)
            ]

        return as_inductor, digest, strides

    monkeypatch.setattr(compiling, "compiled", without_aliases)
    loss_of(plan.apply(model)(x)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def loss_of(output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[0] + output[2].sum()


class PartOfNoise(nn.Module):
    """Draws into a part of a tensor, element by element, as eager does for those alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = x.new_zeros(x.shape[0], 32)
        drawn[:, :16].normal_()
        return (self.inside(x) * drawn[:, :16]).square().mean()


def test_a_draw_into_a_part_of_a_tensor_is_refused_where_it_runs_once_too() -> None:
    with pytest.raises(CaptureError, match=r"^backend='inductor' cannot run aten.normal_functional"):
        planner.plan(PartOfNoise(), torch.randn(64, 16), budget="1GiB", backend="inductor", solver="sqrt_n")


def test_an_error_of_inductor_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("of\nInductor")

    monkeypatch.setattr(compiling, "emitted", fails)
    model, x = built()
    with pytest.raises(
        CaptureError, match=r"cannot lower the forward.*AssertionError: of Inductor.*backend='eager'"
    ):
        planner.plan(model, x, budget="min", backend="inductor", solver="sqrt_n")


def test_a_program_is_lowered_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    step = planner.prepare(model, torch.ones(64, 4), backend="inductor")
    first = step.plan("1GiB", solver="sqrt_n")

    def refused(*_: Any) -> Any:
        raise AssertionError("lowered again")

    monkeypatch.setattr(InductorLowering, "emitted", refused)
    second = step.plan("2GiB", solver="sqrt_n")
    assert first.predicted.dynamic_peak_bytes == second.predicted.dynamic_peak_bytes


def test_a_plan_file_says_what_runs_it(again: tuple[Net, torch.Tensor, planner.Plan], tmp_path: Path) -> None:
    plan = again[2]
    plan.save(tmp_path / "plan.json")
    loaded = planner.Plan.load(tmp_path / "plan.json")
    assert loaded.target.backend == "inductor"
    assert loaded == plan
    without = plan.model_dump(mode="json")
    del without["target"]["backend"], without["target"]["backend_options"]
    assert planner.Plan.model_validate(without).target.backend == "eager"
    with pytest.raises(PlannerError, match="one that Inductor runs"):
        again[2].explain("blocks.0")


def test_a_budget_below_what_the_programs_reach_is_infeasible() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(InfeasibleBudget, match="the least that") as caught:
        planner.plan(model, torch.ones(64, 4), budget=100, backend="inductor", solver="sqrt_n")
    least = planner.plan(
        model, torch.ones(64, 4), budget=caught.value.minimum_bytes, backend="inductor", solver="sqrt_n"
    )
    assert least.predicted.peak_bytes == caught.value.minimum_bytes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "cuda"}, "backend='cuda': expected one of"),
        ({"backend_options": {"max_autotune": False}}, "with backend='auto'"),
        ({"backend": "inductor", "parallel": "ddp:2"}, "single process"),
        ({"backend": "inductor", "backend_options": {"no_such": 1}}, "no option 'no_such'"),
        ({"backend": "inductor", "backend_options": {1: 2}}, "no option 1"),
        ({"backend": "inductor", "backend_options": {"layout-optimization": True}}, "no option 'layout-op"),
        ({"backend": "inductor", "backend_options": {"cpp_wrapper": True}}, "set by the plan"),
        ({"backend": "inductor", "backend_options": {"max_autotune": "x"}}, "expects a bool"),
        ({"backend": "inductor", "backend_options": {"max_autotune": []}}, "a plan keeps numbers"),
    ],
)
def test_options_are_looked_at_before_the_work(options: dict[str, Any], text: str) -> None:
    model, x = built()
    with pytest.raises(OptionError, match=text):
        planner.plan(model, x, budget="min", **options)


def test_a_missing_compiler_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "missing_compiler", lambda: "No working C++ compiler found")
    model, x = built()
    with pytest.raises(CompilerError, match=r"needs a C\+\+ compiler.*install g\+\+"):
        planner.plan(model, x, budget="min", backend="inductor")


def test_programs_without_vectors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling.unused_vectors() is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    model, x = built()
    with pytest.warns(PlanWarning, match="no vector instructions that work, though this CPU has AVX2"):
        planner.plan(model, x, budget="min", backend="inductor", solver="sqrt_n")


def test_a_recurrent_layer_is_refused_in_one_line() -> None:
    model = nn.LSTM(4, 4)
    with pytest.raises(CaptureError, match=r"^backend='inductor' cannot run aten.mkldnn_rnn_layer.*'eager'$"):
        planner.plan(
            model,
            torch.ones(2, 1, 4),
            budget="min",
            backend="inductor",
            solver="sqrt_n",
            loss=lambda out: out[0].sum(),
        )


class Twice(nn.Module):
    """Blocks that run twice in a step, so that their gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.drop.p = 0.0  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


@pytest.mark.heavy
def test_sums_and_what_runs_again_stay_where_the_schedule_has_them() -> None:
    torch.manual_seed(0)
    prepared = planner.prepare(Twice().train(), torch.randn(256, 16), backend="inductor")._prepared
    problem = prepared.problem
    most = simulate(problem.graph, problem.graph.base_schedule).peak_bytes
    found = portfolio.solve(problem.graph, int(most * 0.55), time_limit=5)
    emitted = emitted_model(prepared).step(problem.backward_sequences(prepared.captured, found.schedule))
    assert emitted.peak_bytes <= found.peak_bytes < most * 0.6


@pytest.mark.heavy
def test_programs_compute_and_take_what_was_promised() -> None:
    torch.manual_seed(0)
    model, x = Net(layers=2).train(), torch.randn(64, 16)
    plan = planner.plan(model, x, budget="80%", backend="inductor", solver="sqrt_n")
    assert plan.recomputed_operations > 0
    report = planner.verify(
        model, x, plan=plan, repeats=0
    )  # against unplanned Inductor's distance from exact
    assert report.ok, report.problems
    assert not report.exact
    predicted, measured = report.predicted_dynamic_peak_bytes, report.measured_dynamic_peak_bytes
    assert predicted * 0.93 <= measured <= predicted * 1.005
    torch.compiler.reset()


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_verify_tells_gradients_that_are_farther_off_than_unplanned_ones(
    again: tuple[Net, torch.Tensor, planner.Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: None)
    assert planner.verify(model, x, plan=plan, repeats=0).gradients_equal
    original = compiling.compiled

    def wrong(*args: Any, **kwargs: Any) -> tuple[Any, str, list[Any]]:
        run, _, strides = original(*args, **kwargs)

        def scaled(taken: list[Any]) -> list[Any]:
            return [r * 1.001 if r is not None and r.is_floating_point() else r for r in run(taken)]

        return scaled, "", strides

    monkeypatch.setattr(compiling, "compiled", wrong)
    report = planner.verify(model, x, plan=plan, repeats=0)
    assert not report.gradients_equal
    assert "differs" in report.problems[0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_it_runs_inside_of_compiled_code(again: tuple[Net, torch.Tensor, planner.Plan]) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    expected, _ = left(model, x)
    found, _ = left(torch.compile(plan.apply(model), backend="eager"), x)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_a_kept_plan_is_for_its_backend(again: tuple[Net, torch.Tensor, planner.Plan]) -> None:
    model, x, plan = again
    step = Step((x,), {}, training=True)
    assert "backend inductor, now auto" in mismatch(plan, model, step, "1GiB", {})
    options = {"max_fusion_size": 1}
    assert "max_fusion_size" in mismatch(
        plan, model, step, "1GiB", {"backend": "inductor", "backend_options": options}
    )


@pytest.mark.heavy
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:Inductor emits other programs")
def test_another_shape_is_told_with_what_its_programs_take(
    again: tuple[Net, torch.Tensor, planner.Plan],
) -> None:
    model, x, plan = copy.deepcopy(again[0]), again[1], again[2]
    smaller = x[:32]
    expected, _ = left(model, smaller)
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"dynamic_peak_bytes": 1})})
    with pytest.warns(PlanWarning, match="other than those that were planned.*predicted to peak at"):
        found, _ = left(plan.apply(model), smaller)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


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
