"""Losses in pieces: the peak that is predicted, and gradients as near to the true ones as without a plan."""

import copy
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import planner
from planner._torch.execution.in_double_precision import InDoublePrecision
from planner._torch.joint import aot
from planner.errors import CaptureError, FreedError, PlanMismatch
from planner.graph.joint_graph import read_joint
from planner.graph.spec import Split, SplitForm, SplitRuns
from planner.graph.split.pieces import split_where_possible
from planner.planfile.budget import Budget
from planner.planfile.plan import PlanRecord
from planner.planning import solve
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import _bound, _planned
from planner.planning.split import Forms, _split
from planner.training_step.step import Step
from planner.user_plan import Plan
from planner.verification.measure import measure_peak
from solvers.model.schedule import simulate

pytestmark = pytest.mark.heavy

VOCABULARY, WIDTH = 1000, 16
FORMS: tuple[SplitForm, ...] = ("forward", "backward")
ADD = torch.ops.aten.add.Tensor


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def divided_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / 77


def mean_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").mean()


def gathered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = labels.clamp(min=0).unsqueeze(-1)
    return -logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).mean()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def with_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(5 * torch.tanh(logits / 5), labels)


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, logits.shape[-1]).to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=weight)


LOSSES = [mean, divided_sum, mean_of_rows, gathered, smoothed, with_z_loss, capped, weighted]


class LanguageModel(torch.nn.Module):
    def __init__(self, loss: Any = mean, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(self.embedding(ids)).tanh())
        return {"loss": self.loss(logits, labels), "logits": logits}


def batch(rows: tuple[int, ...] = (3, 50)) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids, labels = (torch.randint(0, VOCABULARY, rows) for _ in range(2))
    labels[..., :5] = -100
    return ids, labels


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"]


def options(**given: Any) -> dict[str, Any]:
    return {"outputs": "dropped", "costs": "roofline", "loss": loss_of, **given}


def prepared(model: torch.nn.Module, args: tuple[Any, ...]) -> Prepared:
    wanted = PlanOptions(**options(backend="eager", split="loss", solver="sqrt_n"))
    return prepare(model, replace(Step.of(model, args, {}, loss_of, "dropped"), training=True), wanted)


def in_pieces(step: Prepared, split: Split, budget: int | str = "min") -> Plan:
    made = _split(step, split)
    plan = _planned(made, made.budget(budget), lambda text, fraction: None)
    return Plan.loads(plan.dumps())


def check(model: torch.nn.Module, args: tuple[Any, ...], plan: Plan) -> None:
    """The peak is the predicted one, and gradients and loss are near enough to those in double precision."""
    report = planner.verify(model, args, plan=plan, loss=loss_of, repeats=0)
    assert report.ok, report.problems
    assert not report.exact
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def assert_near(planned: torch.nn.Module, alone: torch.nn.Module) -> None:
    """Gradients are equal but for the last bits."""
    for name, parameter in planned.named_parameters():
        assert torch.allclose(parameter.grad, alone.get_parameter(name).grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: Any) -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(loss), batch()
    step = prepared(model, args)
    whole = simulate(step.problem.graph, step.problem.graph.base_schedule).peak_bytes
    for split in (Split("forward", 4), Split("backward", 7)):
        plan = in_pieces(step, split)
        assert plan.predicted.dynamic_peak_bytes < whole * 0.6
        check(model, args, plan)


def test_gradients_that_are_multiples_of_two_numbers_are_split_in_the_backward() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return weighted(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()

    torch.manual_seed(0)
    model, args = LanguageModel(loss), batch()
    step = prepared(model, args)
    check(model, args, in_pieces(step, Split("backward", 4)))
    with pytest.raises(CaptureError, match="a sum over all of them"):
        in_pieces(step, Split("forward", 4))


@pytest.mark.parametrize("kind", [{"bias": True}, {"tied": True}])
def test_heads(kind: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(**kind), batch()
    step = prepared(model, args)
    for split in (Split("forward", 4), Split("backward", 4)):
        check(model, args, in_pieces(step, split))


def test_a_frozen_head_has_no_gradient() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    model.head.requires_grad_(False)
    step = prepared(model, args)
    for split in (Split("forward", 4), Split("backward", 4)):
        check(model, args, in_pieces(step, split))


def test_two_heads_of_one_loss_are_one_run() -> None:
    class Distilled(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = torch.nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.embedding(ids)
            student = self.head(self.body(hidden)).log_softmax(-1)
            teacher = self.teacher(hidden).softmax(-1)
            return {"loss": -(teacher * student).sum(-1).mean()}

    torch.manual_seed(0)
    model, args = Distilled(), batch()
    for form in ("forward", "backward"):
        plan = in_pieces(prepared(model, args), Split(form, 5))  # type: ignore[arg-type]
        check(model, args, plan)
        assert plan.graphs[0].split is not None
        assert {run.module for run in plan.graphs[0].split.runs} == {"head", "teacher"}


def test_the_gradient_that_arrives_multiplies_those_of_the_forward() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    plan = in_pieces(prepared(model, args), Split("forward", 4))
    alone = copy.deepcopy(model)
    (3.5 * alone(*args)["loss"]).backward()
    planned = plan.apply(model)
    for _ in range(2):
        planned.zero_grad()
        (3.5 * planned(*args)["loss"]).backward()
        assert_near(planned, alone)


def test_a_second_backward_is_an_error_where_the_first_used_up_the_gradients() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    planned = in_pieces(prepared(model, args), Split("forward", 4)).apply(model)
    loss = planned(*args)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(FreedError, match="plan with split='none'"):
        loss.backward()


class Logits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def likelihood(model: torch.nn.Module, other: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(model(ids), labels)


def preference(model: torch.nn.Module, other: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As in DPO: pairs of sequences, and what another model says of them."""

    def log_probabilities(model: torch.nn.Module) -> torch.Tensor:
        shifted = model(ids)[:, :-1].contiguous()
        chosen = shifted.gather(-1, ids[:, 1:, None]).squeeze(-1)
        rows = chosen - torch.stack([one.logsumexp(-1) for one in shifted])  # as TRL does it
        return torch.where(labels[:, 1:] < 0, 0.0, rows).sum(-1)

    with torch.no_grad():
        reference = log_probabilities(other)
    chosen, rejected = (log_probabilities(model) - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def policy(model: torch.nn.Module, other: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As in GRPO, whose log probabilities are of one sequence after the other in half precision."""

    def log_probabilities(model: torch.nn.Module) -> torch.Tensor:
        pairs = zip(model(ids)[:, :-1][:, -100:], ids[:, -100:], strict=True)
        return torch.stack(
            [rows.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1) for rows, chosen in pairs]
        )

    now, mask = log_probabilities(model), (labels[:, -100:] >= 0).float()
    advantage = torch.linspace(-1, 1, len(ids))[:, None]
    loss = -torch.exp(now - now.detach()) * advantage
    with torch.no_grad():
        reference = log_probabilities(other)
    loss = loss + 0.04 * (torch.exp(reference - now) - (reference - now) - 1)
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def distillation(model: torch.nn.Module, other: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        teacher = other(ids).flatten(0, 1).log_softmax(-1)
    student = model(ids).flatten(0, 1).log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


@pytest.mark.parametrize("step", [likelihood, preference, policy, distillation])
def test_losses_outside_of_the_module_are_split_in_a_planned_step(step: Any) -> None:
    torch.manual_seed(0)
    model, other, args = Logits(), Logits().requires_grad_(False), batch((4, 129))
    alone = copy.deepcopy(model)
    loss = step(alone, other, *args)
    loss.backward()
    if step is likelihood:
        with pytest.raises(CaptureError, match=r"with planner\.step"):
            planner.plan(
                model, args[:1], budget="min", **options(split="loss", loss=lambda x: mean(x, args[1]))
            )
    planned = planner.step(step, budget="min", split="loss", costs="roofline", encodings="none")
    assert torch.allclose(planned(model, other, *args), loss)
    planned(model, other, *args).backward()
    assert_near(model, alone)
    model.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: planned(model, other, *args).backward(), "cpu").peak_bytes
    predicted = planned.plan.predicted.dynamic_peak_bytes
    assert measured == predicted < 0.5 * planned.plan.baseline.dynamic_peak_bytes


def test_regions_that_have_no_loss_stay_whole() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    plan = planner.plan(model, args, budget="min", split="loss", regions=["body"], **options())
    assert sum(graph.split is not None for graph in plan.graphs) == 1 < len(plan.graphs)
    check(model, args, plan)


class MLPs(torch.nn.Module):
    """A language model of MLPs, with gates or with biases."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(32) for _ in range(2))
        self.up, self.down = (
            torch.nn.ModuleList(torch.nn.Linear(*sizes) for _ in range(2)) for sizes in ((32, 256), (256, 32))
        )
        self.gates = torch.nn.ModuleList(torch.nn.Linear(32, 256, bias=False) for _ in range(2 * gated))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for n, norm in enumerate(self.norms):
            y = norm(x)
            inner = F.silu(self.gates[n](y)) * self.up[n](y) if self.gates else F.gelu(self.up[n](y))
            x = x + self.down[n](inner)
        return {"loss": mean(self.head(x), labels)}


def test_mlps_in_pieces() -> None:
    torch.manual_seed(0)
    args = tuple(torch.randint(0, 64, (4, 128)) for _ in range(2))
    model = MLPs(gated=True)
    check(model, args, in_pieces(prepared(model, args), Split("forward", 4, "auto")))
    model = MLPs(gated=False)
    given = options(encodings="none", solver="sqrt_n")
    without = planner.plan(model, args, budget="min", **given)
    plan = planner.plan(model, args, budget="min", split="auto", **given)
    assert plan.predicted.dynamic_peak_bytes < without.predicted.dynamic_peak_bytes * 0.7
    assert plan.graphs[0].split is not None
    assert {"head", "up.0", "up.1"} <= {run.module for run in plan.graphs[0].split.runs}
    assert "at most 4 of 512 rows" in plan.summary()
    check(model, args, plan)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="experts' products are not in one call")
def test_experts_are_judged_in_double_precision() -> None:
    class Experts(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            ends = torch.tensor([100, 300, 512], dtype=torch.int32)
            hidden = F.grouped_mm(self.embedding(ids).flatten(0, 1), self.experts, offs=ends)
            return {"loss": mean(self.head(hidden), labels)}

    torch.manual_seed(0)
    model, args = Experts(), batch((4, 128))
    check(model, args, in_pieces(prepared(model, args), Split("forward", 4)))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="experts' products are not in one call")
def test_experts_products_take_their_offsets_by_position_or_name() -> None:
    rows, weights = torch.randn(8, 16).double(), torch.randn(2, 16, 4).double()
    ends = torch.tensor([3, 8], dtype=torch.int32)
    expected = torch.cat([rows[:3] @ weights[0], rows[3:] @ weights[1]])
    with InDoublePrecision():
        assert torch.equal(torch._grouped_mm(rows, weights, ends), expected)
        assert torch.equal(torch._grouped_mm(rows, weights, offs=ends, out_dtype=None), expected)


def test_results_that_are_hardly_anything_are_not_split() -> None:
    class Convolved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Conv2d(3, 16, 3), torch.nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.head(self.body(x).relu().mean((2, 3))).square().mean()}

    model, args = Convolved(), (torch.randn(4, 3, 32, 32),)
    plan = planner.plan(model, args, budget="min", split="auto", **options(encodings="none"))
    assert plan.is_exact
    without = planner.plan(model, args, budget="min", **options(encodings="none"))
    assert plan.predicted.dynamic_peak_bytes == without.predicted.dynamic_peak_bytes


@pytest.mark.parametrize("form", FORMS)
def test_dropout_draws_the_numbers_of_the_step_without_a_plan(form: SplitForm) -> None:
    class Dropped(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, 8 * WIDTH), torch.nn.Linear(8 * WIDTH, WIDTH)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.body(self.embedding(ids)).tanh()
            x = x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))
            return {"loss": mean(F.dropout(self.head(x), 0.1), labels)}

    torch.manual_seed(0)
    model, args = Dropped(), batch((4, 64))
    plan = in_pieces(prepared(model, args), Split(form, 4, "auto"))
    assert plan.graphs[0].split is not None
    assert {run.module for run in plan.graphs[0].split.runs} == {"head", "up"}
    check(model, args, plan)
    alone = copy.deepcopy(model)
    planned = plan.apply(model)
    for each in (planned, alone):
        torch.manual_seed(1)
        each(*args)["loss"].backward()
    assert_near(planned, alone)


def test_a_split_plan_is_shown_explained_and_reported(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    plan = planner.plan(model, args, budget="min", split="loss", device="A100-80GB", **options())
    assert "head" in plan.summary()
    assert str(plan.explain("head"))
    plan.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size


def test_half_precision_is_added_up_in_single_precision() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel().bfloat16(), batch()
    step = prepared(model, args)
    for split in (Split("forward", 4), Split("backward", 4)):
        check(model, args, in_pieces(step, split))
        (graph,) = [g for g in _split(step, split).captured.graphs if g.spec.split is not None]
        assert graph.joint is not None
        sums = [n.meta["val"] for n in graph.joint.module.graph.find_nodes(op="call_function", target=ADD)]
        of_the_weight = [value.dtype for value in sums if value.numel() == VOCABULARY * WIDTH]
        assert of_the_weight == [torch.float32] * 3  # the sum of four pieces


@pytest.mark.parametrize("form", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "loss"), [({"bias": True}, mean), ({"tied": True}, mean_of_rows)])
def test_what_autocast_makes_of_a_head_is_rounded_once(kind: dict[str, bool], loss: Any, form: Any) -> None:
    class Cast(LanguageModel):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, labels)

    for seed in range(2):
        torch.manual_seed(seed)
        model, args = Cast(loss, **kind), batch((4, 100))
        check(model, args, in_pieces(prepared(model, args), Split(form, 2)))


def test_sums_that_are_larger_than_any_number_of_half_precision() -> None:
    def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.square().mean()

    torch.manual_seed(0)
    model, args = LanguageModel(squares).half(), batch((8, 512))
    plan = in_pieces(prepared(model, args), Split("backward", 2))
    check(model, args, plan)
    assert plan.apply(model)(*args)["loss"].isfinite()


@pytest.mark.parametrize("form", ["forward", "backward"])
def test_double_precision(form: Any) -> None:
    torch.manual_seed(0)
    model, args = LanguageModel().double(), batch()
    check(model, args, in_pieces(prepared(model, args), Split(form, 4)))


def test_a_loss_that_is_scaled_by_a_number_that_is_drawn_behind_it() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean(logits, labels) * torch.rand(())

    torch.manual_seed(0)
    model, args = LanguageModel(loss), batch()
    check(model, args, in_pieces(prepared(model, args), Split("forward", 4)))


def test_weights_of_zero_are_not_a_number_as_without_a_plan() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(VOCABULARY, dtype=logits.dtype)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=nothing)

    torch.manual_seed(0)
    model, args = LanguageModel(loss), batch()
    check(model, args, in_pieces(prepared(model, args), Split("backward", 4)))


def test_what_a_hook_clips_is_split_in_the_backward() -> None:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.clamp(-1e-5, 1e-5)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean(Clipped.apply(logits), labels)

    torch.manual_seed(0)
    model, args = LanguageModel(loss), batch()
    step = prepared(model, args)
    check(model, args, in_pieces(step, Split("backward", 4)))
    with pytest.raises(CaptureError, match="cannot be computed in the forward"):
        in_pieces(step, Split("forward", 4))


@pytest.mark.parametrize("loss", [mean, weighted])
def test_all_rows_ignored_is_a_gradient_of_zeros(loss: Any) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = LanguageModel(loss), batch()
    for form in ("forward", "backward"):
        planned = in_pieces(prepared(model, (ids, labels)), Split(form, 4)).apply(copy.deepcopy(model))  # type: ignore[arg-type]
        found = planned(ids, torch.full_like(labels, -100))["loss"]
        found.backward()
        assert found.isnan()
        assert all(p.grad.count_nonzero() == 0 and not p.grad.isnan().any() for p in planned.parameters())


def test_outputs_that_are_not_kept_say_so() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    planned = planner.plan(model, args, budget="min", split="loss", **options()).apply(model)
    logits = planned(*args)["logits"]
    assert logits.shape == (3, 50, VOCABULARY)
    for use in (
        lambda: logits.argmax(-1).tolist(),
        lambda: logits[0, 0, 0].item(),
        lambda: logits + args[0][..., None],
        lambda: torch.zeros(()).add_(logits.sum()),
        lambda: torch.zeros(3).fill_(logits.mean()),
        lambda: torch.ones(3).div_(logits.mean()),
        lambda: logits.detach().numpy(),
    ):
        with pytest.raises(PlanMismatch, match="this output of the model was not kept"):
            use()
    assert type(torch.zeros_like(logits, device="cpu") + 1) is torch.Tensor
    with torch.no_grad():
        assert planned(*args)["logits"].isfinite().all()


@pytest.mark.filterwarnings("error:PyTorch traces")
def test_other_shapes_are_as_many_pieces() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    planned = planner.plan(model, batch(), budget="min", split="loss", **options()).apply(
        copy.deepcopy(model)
    )
    for rows in ((3, 40), (2, 33), (1, 7), (3, 50)):
        args = batch(rows)
        alone = copy.deepcopy(model)
        alone(*args)["loss"].backward()
        planned.zero_grad()
        planned(*args)["loss"].backward()
        assert_near(planned, alone)


def test_a_plan_is_the_best_of_both_forms(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch((8, 128))
    without = planner.plan(model, args, budget="min", **options())
    least = planner.plan(model, args, budget="min", split="loss", **options())
    assert least.predicted.dynamic_peak_bytes < without.predicted.dynamic_peak_bytes / 2
    fits = planner.plan(model, args, budget=without.predicted.peak_bytes // 2, split="loss", **options())
    assert fits.predicted.seconds <= fits.no_recompute.seconds * 1.05
    for plan in (least, fits):
        assert "in pieces" in plan.summary()
        assert "not equal in the last bits" in plan.summary()
        plan.save(tmp_path / "plan.json")
        check(model, args, Plan.load(tmp_path / "plan.json"))


def test_where_there_is_room_a_loss_is_in_fewer_pieces() -> None:
    """Each piece adds to the whole gradient of the weight."""
    torch.manual_seed(0)
    model, args = LanguageModel(), batch((8, 128))
    least = planner.plan(model, args, budget="min", split="loss", **options())
    more = least.baseline.dynamic_peak_bytes // 2 + least.resident.total
    fits = planner.plan(model, args, budget=more, split="loss", **options())
    pieces = [graph.split.pieces for plan in (least, fits) for graph in plan.graphs if graph.split]
    assert pieces[1] < pieces[0]
    assert fits.predicted.seconds < least.no_recompute.seconds
    check(model, args, fits)


def test_forms_of_a_step_are_rivals_and_mlps_in_pieces_make_none_slower() -> None:
    torch.manual_seed(0)
    args = tuple(torch.randint(0, 64, (4, 128)) for _ in range(2))
    model = MLPs(gated=False)
    wanted = PlanOptions(**options(backend="eager", split="auto", encodings="none"))
    step = prepare(model, replace(Step.of(model, args, {}, loss_of, "dropped"), training=True), wanted)
    calls = list[tuple[SplitRuns, bool, float, float]]()

    def planned(
        prepared: Prepared, budget: Budget, report: Any, minimum: bool = True, rival: float = math.inf
    ) -> PlanRecord:
        plan = _planned(prepared, budget, report, minimum, rival)
        split = prepared.captured.graphs[0].spec.split
        calls.append(("loss" if split is None else split.what, minimum, rival, plan.predicted.seconds))
        return plan

    for share in (0.3, 0.4, 0.6):
        calls.clear()
        room = int(share * step.problem.eager.peak_bytes)
        budget = step.budget(step.resident.total + room)
        best = Forms(step, planned, _bound).planned(budget, room, lambda text, fraction: None)
        fastest = math.inf
        for _, minimum, rival, seconds in calls:
            assert not minimum  # the least is of no use where a plan is found
            assert rival == fastest
            fastest = min(fastest, seconds)
        assert best.predicted.seconds == fastest
        kinds = [what for what, *_ in calls]
        assert kinds == sorted(kinds, reverse=True)  # those of the loss come first, as with split="loss"
        assert best.predicted.dynamic_peak_bytes <= room


def test_the_least_is_a_plan_that_was_found_where_time_ends_the_search_for_a_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planner.planning.split._LEAST_SECONDS", 0.3)
    torch.manual_seed(0)
    model, args = LanguageModel(), batch((4, 64))
    wanted = PlanOptions(**options(backend="eager", split="loss"))
    step = prepare(model, replace(Step.of(model, args, {}, loss_of, "dropped"), training=True), wanted)
    found = list[PlanRecord]()

    def planned(
        prepared: Prepared, budget: Budget, report: Any, minimum: bool = True, rival: float = math.inf
    ) -> PlanRecord:
        if budget.bytes is not None:
            raise planner.InfeasibleBudget("no time", minimum_bytes=2**40, budget_bytes=budget.bytes)
        found.append(_planned(prepared, budget, report, minimum, rival))
        return found[-1]

    least = Forms(step, planned, _bound).planned(step.budget("min"), None, lambda text, fraction: None)
    assert least.predicted.peak_bytes == min(plan.predicted.peak_bytes for plan in found)
    assert least.graphs[0].split is not None
    assert least.target.budget_text == "min"
    assert least.made_with == step.options


def test_a_row_alone_is_not_split_and_half_precision_follows_in_the_backward() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    plan = in_pieces(prepared(model, args), Split("forward", 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = plan.apply(copy.deepcopy(model))
        planned(*(values[:1, -1:] for values in args))["loss"].backward()
    planned = plan.apply(copy.deepcopy(model))
    with (
        pytest.warns(planner.PlanWarning, match=r"under autocast off then.*Plan it again"),
        torch.autocast("cpu", torch.float16),
    ):
        loss = planned(*args)["loss"]
    loss.backward()
    assert loss.isfinite()


def test_sweeps_and_largest_batches_in_pieces() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch((8, 128))
    swept = planner.sweep(model, args, points=3, split="loss", **options())
    assert [plan.predicted.seconds for plan in swept] == sorted(plan.predicted.seconds for plan in swept)
    check(model, args, swept[-1])

    def sized(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch((size, 32))

    given: dict[str, Any] = {"loss": loss_of, "outputs": "dropped", "encodings": "none", "max_overhead": None}
    largest = planner.max_batch(model, sized, "8MiB", split="loss", **given)
    assert largest.unplanned is not None
    assert largest.batch > 5 * largest.unplanned.batch
    check(model, sized(largest.batch), largest.plan)


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)] * 2
        self.parts, self.head = torch.nn.Sequential(*parts), torch.nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x + self.parts(x)), labels)


def test_a_faster_plan_that_takes_more_is_no_answer_to_another_budget() -> None:
    args = torch.randn(1024, 64), torch.randint(0, 2048, (1024,))
    budgets, given = ["min@0.5%", "25%", "min"], {"outputs": "dropped", "costs": "roofline"}
    swept = planner.sweep(Blocks(), args, budgets=budgets, split="loss", **given)  # type: ignore[arg-type]
    by_budget = {plan.target.budget_text: plan for plan in swept}
    quick, share, least = (by_budget[budget] for budget in budgets)
    assert share.target.budget_bytes is not None
    assert least.predicted.peak_bytes <= share.predicted.peak_bytes <= share.target.budget_bytes
    assert share.target.budget_bytes < quick.predicted.peak_bytes
    assert Plan.loads(share.dumps()) == share


def test_what_pieces_themselves_take_is_extra_time() -> None:
    args = torch.randn(1024, 64), torch.randint(0, 2048, (1024,))
    given: dict[str, Any] = {"outputs": "dropped", "costs": "roofline", "split": "loss"}
    least, quick = (planner.plan(Blocks(), args, budget=budget, **given) for budget in ("min", "min@1%"))
    assert least.overhead == least.predicted.seconds / least.baseline.seconds - 1 > 0.01
    assert quick.predicted.seconds <= 1.01 * quick.baseline.seconds
    assert least.predicted.peak_bytes < quick.predicted.peak_bytes < quick.baseline.peak_bytes


def test_a_plan_for_fewer_bytes_is_not_said_to_be_the_best_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    class Slower(Forms):
        def planned(self, *given: Any) -> Any:
            plan = super().planned(*given)
            solver = plan.solver.model_copy(update={"status": "optimal", "gap": 0.0, "bound_seconds": 1e-9})
            seconds = plan.predicted.seconds * (1 + 9 * len(made))
            predicted = plan.predicted.model_copy(update={"seconds": seconds})
            made.append(plan.model_copy(update={"solver": solver, "predicted": predicted}))
            return made[-1]

    monkeypatch.setattr(solve, "Forms", Slower)
    args = torch.randn(1024, 64), torch.randint(0, 2048, (1024,))
    budgets: list[int | str] = ["40%", "90%"]
    swept = planner.sweep(Blocks(), args, budgets=budgets, split="loss", costs="roofline")
    few, many = sorted(swept, key=lambda plan: budgets.index(plan.target.budget_text))
    assert (few.solver.status, few.solver.bound_seconds) == ("optimal", 1e-9)
    assert many.predicted == few.predicted != made[1].predicted
    assert (many.solver.status, many.solver.gap, many.solver.bound_seconds) == ("feasible", None, None)


def test_six_steps_of_adamw_stay_as_near_as_sums_in_another_order() -> None:
    torch.manual_seed(0)
    model, (ids, labels) = LanguageModel(), batch((4, 64))
    other_order = torch.randperm(4)
    plan = planner.plan(model, (ids, labels), budget="min", split="loss", **options())

    def trained(planned: bool, order: torch.Tensor, kind: torch.dtype = torch.float32) -> list[torch.Tensor]:
        again = copy.deepcopy(model).to(kind)
        again = plan.apply(again) if planned else again
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        for _ in range(6):
            optimizer.zero_grad()
            again(ids[order], labels[order])["loss"].backward()
            optimizer.step()
        return [p.detach().double() for p in again.parameters()]

    def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))

    as_it_is = torch.arange(4)
    true = trained(False, as_it_is, torch.float64)
    alone = max(apart(trained(False, order), true) for order in (as_it_is, other_order))
    assert apart(trained(True, as_it_is), true) <= 1.5 * alone


def test_where_all_fits_nothing_is_split() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch()
    plan = planner.plan(model, args, budget="200%", split="loss", **options())
    assert plan.graphs[0].split is None
    assert planner.verify(model, args, plan=plan, loss=loss_of, repeats=0).exact


def test_a_budget_that_is_too_small_says_the_least_and_min_takes_hardly_more() -> None:
    torch.manual_seed(0)
    model, args = LanguageModel(), batch((8, 128))
    with pytest.raises(planner.InfeasibleBudget) as error:
        planner.plan(model, args, budget=1000, split="loss", **options())
    minimum = error.value.minimum_bytes
    assert str(error.value).startswith("budget 1000 is 1000 B (1,000 bytes), but the least that ")
    exactly = planner.plan(model, args, budget=minimum, split="loss", **options())
    assert exactly.predicted.peak_bytes == minimum
    least = planner.plan(model, args, budget="min", split="loss", **options())
    more = least.predicted.peak_bytes - minimum
    assert 0 <= more <= least.baseline.dynamic_peak_bytes * 0.02
    assert least.target.budget_text == "min"
    assert least.target.budget_bytes is None
    assert least.predicted.seconds <= exactly.predicted.seconds
    part = planner.plan(model, args, budget="min@50%", split="loss", **options())
    assert part.predicted.dynamic_peak_bytes == least.predicted.dynamic_peak_bytes


def test_a_budget_that_is_too_small_says_that_pieces_would_help() -> None:
    model, args = LanguageModel(), batch((8, 128))
    with pytest.raises(planner.InfeasibleBudget, match="MiB of it come from head: plan with split='loss'"):
        planner.plan(model, args, budget="10%", **options())
    small = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    with pytest.raises(planner.InfeasibleBudget) as error:
        planner.plan(small, (torch.randn(4, 8),), budget=1000)
    assert "split" not in str(error.value)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"outputs": "held"}, "plan with outputs='dropped'"),
        ({"backend": "replay"}, "leave backend= out"),
        ({"backend": "inductor"}, "leave backend= out"),
        ({"split": "all"}, "expected one of"),
        ({"in_flight": 2}, "processes that run the whole step"),
    ],
)
def test_what_cannot_be_split_says_what_to_do(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(planner.PlannerError, match=message):
        planner.plan(LanguageModel(), batch(), budget="min", **options(**{"split": "loss", **given_options}))


def test_a_loss_of_all_rows_at_once_cannot_be_split() -> None:
    def contrastive(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.flatten(0, -2)
        return (rows @ rows.t()).log_softmax(0).diagonal().mean()

    with pytest.raises(CaptureError, match=r"needs all rows of .* at once. Plan with split='none'"):
        planner.plan(LanguageModel(contrastive), batch(), budget="min", split="loss", **options())


ELEMENTWISE = {
    "tanh": torch.tanh,
    "scaled": lambda x: 0.5 * x,
    "square": torch.square,
    "shifted": lambda x: x - x.amax(-1, keepdim=True).detach(),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "normed": lambda x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt(),
    "doubled": lambda x: x + x.sigmoid(),
    "part": lambda x: x[..., 1:],
    "viewed": lambda x: x.reshape(-1, x.shape[-1]).unsqueeze(0).squeeze(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cast": lambda x: x.float().double(),
    "capped": lambda x: 5 * torch.tanh(x / 5),
    "masked": lambda x: x * (torch.arange(x.numel()).view(x.shape) % 3 > 0) / 0.67,
    "rows": lambda x: x[..., 1:, :],
}
REDUCED = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum() / 100,
    "rows": lambda x: x.logsumexp(-1).mean(),
    "squares": lambda x: x.square().sum(-1).mean(),
    "both": lambda x: x.mean() + x.square().mean(),
    "gathered": lambda x: x.log_softmax(-1).gather(-1, _chosen(x)[..., None]).mean(),
    "smoothed": lambda x: F.cross_entropy(x.flatten(0, -2), _chosen(x).flatten(), label_smoothing=0.1),
    "one_by_one": lambda x: F.cross_entropy(x.flatten(0, -2), _chosen(x).flatten(), reduction="none").mean(),
    "sequences": lambda x: F.logsigmoid(x.logsumexp(-1).sum(-1)).mean(),
}


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % x.shape[-1]


class RandomHead(torch.nn.Module):
    def __init__(self, names: list[str], ending: str, kind: str, mlp: bool) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 24, bias=kind == "bias")
        self.norm = torch.nn.LayerNorm(24) if kind == "norm" else torch.nn.Identity()
        self.mlp = torch.nn.ModuleList([torch.nn.Linear(6, 9), torch.nn.Linear(9, 6)] if mlp else [])
        self.steps, self.ending = [ELEMENTWISE[name] for name in names], REDUCED[ending]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        if self.mlp:
            x = x + self.mlp[1](F.gelu(self.mlp[0](x)))
        x = self.norm(self.head(x))
        for step in self.steps:
            x = step(x)
        return self.ending(x)


class _JointGraph(Exception):
    """Carries a joint graph out of the compiler."""


def joint_of(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.fx.GraphModule, int]:
    """The joint graph of a module, and how many of its outputs belong to the forward."""
    names = [name for name, _ in model.named_parameters()]

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,)),)

    def partition(joint: torch.fx.GraphModule, outputs: int) -> Any:
        raise _JointGraph(joint, outputs)

    inputs = (x, *(p.detach().requires_grad_() for p in model.parameters()))
    with pytest.raises(_JointGraph) as found:
        aot.compile_joint(
            make_fx(call)(*inputs), inputs, partition=partition, forward_compiler=lambda g: g,
            backward_compiler=lambda g: g, layouts={},
        )  # fmt: skip
    joint, outputs = found.value.args
    read_joint(joint, outputs)  # without dead code
    return joint, outputs


@settings(max_examples=24, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.sampled_from(sorted(ELEMENTWISE)), max_size=4),
    st.sampled_from(sorted(REDUCED)),
    st.sampled_from(["plain", "bias", "norm"]),
    st.booleans(),
    st.sampled_from([(40,), (2, 21), (1, 30)]),
)
def test_random_row_wise_graphs(
    names: list[str], ending: str, kind: str, mlp: bool, rows: tuple[int, ...]
) -> None:
    """Each in four splits: some 100 graphs in pieces give what they give as a whole."""
    linear = {"scaled", "part", "viewed", "shifted", "cast", "masked", "rows"}
    assume(
        kind == "norm" or not (linear.issuperset(names) and ending in ("mean", "sum"))
    )  # gradients read no rows
    torch.manual_seed(0)
    model, x = RandomHead(names, ending, kind, mlp).double(), torch.randn(*rows, 6, dtype=torch.float64)
    joint, outputs = joint_of(model, x)
    given = [x, *model.parameters(), torch.tensor(3.0, dtype=torch.float64)]
    whole = torch.fx.Interpreter(joint).run(*given, enable_io_processing=False)
    accuracy = 1e-6 if "cast" in names else 1e-9
    for split in (Split(form, n, "auto") for form in FORMS for n in (2, 5)):
        made = split_where_possible(joint, outputs, split)
        assert {run.in_loss for run in made.runs} == ({False, True} if mlp else {True})
        results = torch.fx.Interpreter(made.joint).run(*given, enable_io_processing=False)
        for one, other in zip(whole, results, strict=True):
            if one is not None:
                assert torch.allclose(one, other, rtol=accuracy, atol=accuracy)


def _like(*shape: int) -> torch.Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)


ODD: dict[str, tuple[tuple[int, ...], Any]] = {
    "one row meets several": ((40,), lambda x: ((x[-1:] - _like(16, 24)) ** 2).mean()),
    "one row is expanded": ((40,), lambda x: (x[:1].expand(3, -1) * _like(3, 24)).square().sum()),
    "each sequence's last meets several": (
        (4, 32),
        lambda x: F.mse_loss(x[:, -1:].expand(4, 3, 24), _like(4, 3, 24)),
    ),
    "one row is viewed": ((40,), lambda x: x[3:4].view(1, 1, 24).softmax(-1).square().mean()),
    "no row": ((2, 21), lambda x: x[:, 2:2].square().sum()),
    "several results": ((40,), lambda x: torch.frexp(x)[0].square().sum()),
    "a norm of what is small": ((4, 32), lambda x: F.layer_norm(x.logsumexp(-1), (32,)).square().mean()),
    "a loss of three dimensions": ((2, 21), lambda x: x.square().mean((0, 1, 2), keepdim=True)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows_and_results(name: str) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(6, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ODD[name][1](self.head(x))

    torch.manual_seed(0)
    model, x = Head().double(), torch.randn(*ODD[name][0], 6, dtype=torch.float64)
    joint, outputs = joint_of(model, x)
    given = [x, *model.parameters(), torch.full_like(model(x), 3.0)]
    whole = torch.fx.Interpreter(joint).run(*given, enable_io_processing=False)
    for form in FORMS:
        made = split_where_possible(joint, outputs, Split(form, 3))
        results = torch.fx.Interpreter(made.joint).run(*given, enable_io_processing=False)
        for one, other in zip(whole, results, strict=True):
            assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "rounded",
    [lambda g: g.to(torch.float8_e4m3fn).float(), lambda g: (g * 1e4).to(torch.int32).float() / 1e4],
)
def test_a_gradient_that_a_hook_rounds_is_no_multiple(rounded: Any) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits.register_hook(rounded)
        return mean(logits, labels)

    with pytest.raises(CaptureError, match="gradients cannot be computed in the forward"):
        in_pieces(prepared(LanguageModel(loss), batch()), Split("forward", 4))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 1.5, VOCABULARY)])
def test_a_mean_of_half_precision_is_rounded_once(kind: torch.dtype, weight: torch.Tensor | None) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of = None if weight is None else weight.to(logits.dtype)
        return F.cross_entropy(60 * logits.flatten(0, -2), labels.flatten(), weight=of)

    torch.manual_seed(0)
    model, args = LanguageModel(loss).to(kind), batch((4, 750))
    planned = in_pieces(prepared(model, args), Split("backward", 2)).apply(copy.deepcopy(model))
    scores = (60 * model(*args)["logits"].flatten(0, -2)).log_softmax(-1)
    exact = F.nll_loss(
        scores.double(), args[1].flatten(), None if weight is None else weight.to(kind).double()
    )
    error = (planned(*args)["loss"] - exact).abs() / exact
    assert error < torch.finfo(kind).eps * (1 if weight is None else 2)  # the weights' sum is rounded too


def test_a_refused_backward_of_a_loss_in_pieces_can_be_repeated() -> None:
    model, args = LanguageModel(), batch()
    loss = in_pieces(prepared(model, args), Split("forward", 4)).apply(model)(*args)["loss"]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(planner.PlanMismatch, match="use_deterministic_algorithms"):
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    loss.backward()
