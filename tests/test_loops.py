"""Training loops as people write them, with and without a plan: what they leave is equal bit for bit."""

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import planner
from planner.errors import PlanWarning
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.side_by_side import (
    Layers,
    assert_same,
    assert_trains_alike,
    counting_runs,
    layers,
    left_by,
    no_plan_warnings,
    plan_of,
)
from tests.small import small_gpt, small_resnet

Loop = Callable[[Any], Any]


def steps(args: Sequence[Any], count: int = 2, lr: float = 0.1) -> Loop:
    """A plain loop of SGD with momentum."""

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr, momentum=0.9), []
        for _ in range(count):
            optimizer.zero_grad()
            losses.append(model(*args))
            losses[-1].backward()
            optimizer.step()
        return losses

    return loop


# ---- autocast, scaling, accumulating, clipping ------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        # So large that the first step overflows in half precision and is skipped.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        left: list[Any] = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(*args)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            left.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            left += [loss, scaler.get_scale()]
        return left

    assert_trains_alike(model, args, loop, expected_runs=4, autocast=dtype)


@pytest.mark.heavy
def test_autocast_inside_the_model() -> None:
    class Inside(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model, args, _ = layers(Inside)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


class Shared(Layers):
    """Weights that are used several times: by autocast, which casts once a region, and by explicit casts."""

    def __init__(self) -> None:
        super().__init__(3)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.extra = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self.extra(torch.tanh(self.extra(x))))
        for _ in range(2):
            x = x.bfloat16() @ self.extra.weight.to(torch.bfloat16)
        return x.square().mean()


class SharedInside(Shared):
    """The same in two regions of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.extra(torch.tanh(self.extra(x)))
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class PartlyInSingle(Layers):
    """Of which a part is in single precision, whatever region of autocast is around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            x = x + self.layers[1](x.float())
        return x.square().mean()


def test_backward_is_not_under_autocast_though_the_forward_is() -> None:
    model, args, _ = layers(PartlyInSingle)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    assert_trains_alike(model, args, lambda m: [step(m)], expected_runs=1, autocast=torch.bfloat16)


class BreaksBelow(nn.Module):
    """A graph breaks in a part, so that the region around it is not in any graph."""

    class Part(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[1](x).square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.part(x)
        return loss


@pytest.mark.heavy
def test_a_region_of_autocast_that_is_in_no_graph_is_around_those_that_it_is_around() -> None:
    model, args, _ = layers(BreaksBelow)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=4)
    assert "aten._to_copy.default" in {op.name for graph in plan.graphs for op in graph.ops}


@pytest.mark.heavy
def test_weights_that_are_used_twice_under_autocast() -> None:
    model, args, _ = layers(Shared)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    plan = assert_trains_alike(
        model, args, lambda m: [step(m), step(m)], expected_runs=2, autocast=torch.bfloat16
    )
    model.zero_grad()
    assert measure_peak(lambda: step(model), "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes
    casts = [op for op in plan.graphs[0].ops if op.name == "aten._to_copy.default" and op.phase == "forward"]
    # A weight and a bias of the shared layer, and two explicit casts of its weight.
    assert sum(op.module == "extra" for op in casts) == 3  # and its input


@pytest.mark.heavy
def test_weights_that_are_used_twice_in_regions_of_the_model() -> None:
    model, args, _ = layers(SharedInside)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


@pytest.mark.heavy
def test_autocast_that_the_plan_does_not_know_is_said_and_right() -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)

    def loop(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(*args)
        loss.backward()
        return loss

    with pytest.warns(PlanWarning, match="off then, cpu:bfloat16 now"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_accumulation_with_clipping_and_both_kinds_of_zero_grad() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        optimizer, left = torch.optim.AdamW(model.parameters(), 1e-2), []
        for set_to_none in (True, False, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in args[0].chunk(2):
                loss = model(part) / 2
                loss.backward()
                left.append(loss)
            left.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
        return left

    assert_trains_alike(model, (args[0][:32],), loop, expected_runs=6)


@pytest.mark.heavy
def test_accumulation_in_a_convolutional_net_updates_statistics_as_often_as_eager() -> None:
    model, args, _ = small_resnet()

    def loop(model: nn.Module) -> list[Any]:
        left = []
        for shift in range(3):
            loss = model(args[0] + shift, args[1]) / 3
            loss.backward()
            left.append(loss)
        return left

    assert_trains_alike(model, args, loop, expected_runs=3)


# ---- losses, outputs, inputs ------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two outputs, each with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(3)
        self.head, self.extra = nn.Linear(32, 5), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body.run(x)
        return {"logits": self.head(x), "extra": self.extra(x).exp().log()}


def logits_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output["logits"], torch.zeros(len(output["logits"]), dtype=torch.long))


def extra_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["extra"].square().mean()


def both_losses(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return logits_loss(output) + extra_loss(output)


@pytest.mark.heavy
def test_two_losses_with_a_backward_each() -> None:
    model, args, _ = layers(TwoHeads)

    def loop(model: nn.Module) -> list[Any]:
        output = model(*args)
        logits_loss(output).backward(retain_graph=True)
        between = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        extra_loss(output).backward()
        return [between, output]

    assert_trains_alike(model, args, loop, expected_runs=2, loss=both_losses)


@pytest.mark.heavy
@pytest.mark.parametrize("loss", [logits_loss, extra_loss])
def test_an_output_that_the_loss_stops_using_leaves_no_gradient(loss: Callable[..., torch.Tensor]) -> None:
    model, args, _ = layers(TwoHeads)

    def loop(model: nn.Module) -> list[Any]:
        # Weight decay tells a gradient of zeros from none at all.
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
        for chosen in (both_losses, loss, both_losses):
            optimizer.zero_grad()
            chosen(model(*args)).backward()
            optimizer.step()
        loss(model(*args)).backward()
        return []

    assert_trains_alike(model, args, loop, expected_runs=4, loss=both_losses)


@pytest.mark.heavy
def test_a_gradient_that_is_not_there_is_not_a_zero_that_meets_infinity() -> None:
    class Infinite(TwoHeads):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            output = super().forward(x)
            return {**output, "extra": (output["extra"] - output["extra"].detach()).abs().log()}

    model, args, _ = layers(Infinite)

    def loop(model: nn.Module) -> torch.Tensor:
        loss = logits_loss(model(*args))
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        return loss

    assert_trains_alike(model, args, loop, expected_runs=1, loss=both_losses)


@pytest.mark.heavy
def test_an_intermediate_loss_across_a_graph_break() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.early = Layers(3), Layers(3), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first.run(x)
            early = self.early(x).square().mean()
            torch._dynamo.graph_break()
            return early, self.second(x)

    model, args, _ = layers(Early)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        early, late = model(*args)
        late.backward(retain_graph=True)
        (early * late).backward()
        early, late = model(*args)
        early.backward()
        return [early, late]

    plan = assert_trains_alike(model, args, loop, expected_runs=5, loss=sum)
    assert plan.coverage == "several-graphs"


@pytest.mark.heavy
def test_inputs_that_need_gradients() -> None:
    model, args, _ = layers()
    x, before = args[0].requires_grad_(), nn.Linear(32, 32)

    def loop(model: nn.Module) -> list[torch.Tensor]:
        x.grad = None
        before.zero_grad()
        losses = [model(x), model(before(x)), model(x.detach())]
        for loss in losses:
            loss.backward()
        assert x.grad is not None
        assert before.weight.grad is not None
        return [*losses, x.grad, before.weight.grad]

    assert_trains_alike(model, (x,), loop, expected_runs=3)


@pytest.mark.heavy
def test_an_input_that_needs_a_gradient_unplanned_is_said_and_right() -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan_of(model, args).apply(model)
    x = args[0].clone().requires_grad_()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        x.grad = None
        loss = model(x)
        loss.backward()
        assert x.grad is not None
        return [loss, x.grad]

    with pytest.warns(PlanWarning, match="other parameters to train"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_autograd_grad_of_some_and_of_all_parameters() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        parameters = list(model.parameters())
        loss = model(*args)
        every = torch.autograd.grad(loss, parameters)
        loss = model(*args)
        some = torch.autograd.grad(loss * 2, parameters[3:5])
        assert all(p.grad is None for p in parameters)
        return [every, some]

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_retain_graph() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(*args)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return loss

    assert_trains_alike(model, args, loop, expected_runs=3)


class Critic(nn.Module):
    """Smooth, without dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        body = [(nn.Linear(16, 64), nn.Softplus(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)]
        self.body = nn.Sequential(*(layer for part in body for layer in part), nn.Dropout(dropout))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _critic(dropout: float = 0.0) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Critic(dropout), torch.randn(64, 16, requires_grad=True)
    twin = copy.deepcopy(model)
    plan = plan_of(model, (x,), loss=torch.sum)
    assert plan.graphs[0].recomputed
    return plan.apply(model), twin, x


@pytest.mark.heavy
def test_a_gradient_penalty_falls_back_to_the_original_and_says_so() -> None:
    model, twin, x = _critic()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizer, left = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(2):
            optimizer.zero_grad()
            (model(x + 1).mean() - model(x.detach()).mean()).backward()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            penalty.backward()
            optimizer.step()
            left += [slope, penalty]
        return left

    with pytest.warns(PlanWarning, match="create_graph"):
        ours = left_by(model, loop)
    assert_same(ours, left_by(twin, loop))


@pytest.mark.heavy
def test_a_second_derivative_through_random_numbers_is_an_error() -> None:
    model, _, x = _critic(0.5)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match=r"draws random numbers.*planner\.remove"):
        slope.square().sum().backward()
    planner.remove(model)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.heavy
def test_a_second_derivative_after_the_weights_have_changed_is_an_error() -> None:
    model, _, x = _critic()
    output = model(x).sum()
    with torch.no_grad():
        model.head.bias.add_(1)  # type: ignore[operator, union-attr]
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(planner.PlanMismatch, match="have been changed since"):
        slope.square().sum().backward()


@pytest.mark.heavy
def test_a_loss_that_is_kept_does_not_keep_the_inputs() -> None:
    model, _, x = _critic()
    losses, batches = [], []
    for _ in range(2):
        batch = x.detach().clone()
        batches.append(weakref.ref(batch.untyped_storage()))
        losses.append(model(batch).sum())
        losses[-1].backward()
        del batch
    assert [batch() for batch in batches] == [None, None]


# ---- which parameters train -------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear layer and a trainable correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))


@pytest.mark.heavy
def test_lora_in_a_frozen_transformer() -> None:
    model, args, _ = small_gpt()
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.query_key_value = LoRA(block.query_key_value)
    plan = assert_trains_alike(model, args, steps(args), expected_runs=2)
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: _step(model, args), "cpu").peak_bytes == plan.predicted.dynamic_peak_bytes


def _step(model: nn.Module, args: Sequence[Any]) -> torch.Tensor:
    loss: torch.Tensor = model(*args)
    loss.backward()
    return loss


@pytest.mark.heavy
def test_layers_that_are_frozen_and_thawed_after_apply_follow_the_plan() -> None:
    model, args, _ = layers()
    peaks = []

    def loop(model: nn.Module) -> list[Any]:
        left = []
        for frozen in ([], [0, 1], [1, 2], []):
            for i, layer in enumerate(model.layers):
                layer.requires_grad_(i not in frozen)
            for _ in range(2):
                model.zero_grad()
                left.append(model(*args))
                left[-1].backward()
            left.append([p.grad for p in model.parameters()])
            model.zero_grad()
            with torch.random.fork_rng():
                peaks.append(measure_peak(lambda: _step(model, args), "cpu").peak_bytes)
        return left

    plan = assert_trains_alike(model, args, loop, expected_runs=12)
    planned = peaks[: len(peaks) // 2]
    assert planned[0] == planned[-1] == plan.predicted.dynamic_peak_bytes
    assert max(planned) == planned[0]


@pytest.mark.heavy
def test_thawing_what_the_plan_saw_frozen_is_said_and_right() -> None:
    model, args, _ = layers()
    model.layers[0].requires_grad_(False)  # type: ignore[index, union-attr]
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    plan.apply(model)
    for network in (model, twin):
        network.requires_grad_(True)
    with pytest.warns(PlanWarning, match=f"re-runs the {len(plan.graphs[0].recomputed)} that are there"):
        ours = left_by(model, steps(args))
    assert_same(ours, left_by(twin, steps(args)))


@pytest.mark.heavy
def test_nothing_left_to_train() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[Any]:
        model.requires_grad_(False)
        without = model(*args)
        model.requires_grad_(True)
        loss = model(*args)
        loss.backward()
        return [without, without.requires_grad, loss]

    assert_trains_alike(model, args, loop, expected_runs=1)


@pytest.mark.heavy
def test_tied_weights() -> None:
    class Tied(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 32)
            self.layers[3][0].weight = self.layers[1][0].weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.run(self.words(words)) @ self.words.weight.T, words)

    torch.manual_seed(0)
    model, args = Tied(), (torch.randint(0, 30, (64,)),)
    assert_trains_alike(model, args, steps(args), expected_runs=2)


@pytest.mark.heavy
def test_parametrizations_and_their_buffers() -> None:
    norms = torch.nn.utils.parametrizations

    class Normed(Layers):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                norms.weight_norm(layer[0])
                norms.spectral_norm(layer[3])

    model, args, _ = layers(Normed)
    assert_trains_alike(model, args, steps(args, 3), expected_runs=3)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_and_spectral_norm_by_hooks() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Layers()
        for layer in model.layers:
            torch.nn.utils.weight_norm(layer[0])
            torch.nn.utils.spectral_norm(layer[3])
        return model

    model, twin, args = build(), build(), layers()[1]  # such models cannot be copied
    plan_of(model, args).apply(model)
    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(model, steps(args, 3))
    assert runs.backward == 3
    assert_same(ours, left_by(twin, steps(args, 3)))


@pytest.mark.heavy
def test_an_optimizer_that_steps_inside_backward() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = [_step(model, args) for _ in range(3)]
        for hook in hooks:
            hook.remove()
        assert all(p.grad is None for p in model.parameters())
        return losses

    assert_trains_alike(model, args, loop, expected_runs=3)


@pytest.mark.heavy
def test_hooks_on_parameters_change_gradients() -> None:
    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))

    model, args, _ = layers()
    assert_trains_alike(model, args, steps(args), expected_runs=2, prepare=hook)
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) <= 1e-4


# ---- several calls, several models ------------------------------------------------------------------


@pytest.mark.heavy
def test_forwards_without_gradients_and_in_eval_mode_in_between() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        first = model(*args)
        with torch.no_grad():
            silent = model(*args)
        model.eval()
        evaluated = model(*args)
        model.train()
        second = model(*args)
        with warnings.catch_warnings():  # what was computed in evaluation mode is trained without the plan
            warnings.filterwarnings("ignore", "the plan is for training mode", PlanWarning)
            (first + second + evaluated).backward()
        return [first, silent, evaluated, second]

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_one_module_called_twice_in_a_step() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(*args) * model(args[0] + 1)
        loss.backward()
        return loss

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_one_plan_on_two_instances() -> None:
    (model, args, _), (other, _, _) = layers(), layers(seed=3)
    twins = [copy.deepcopy(model), copy.deepcopy(other)]
    plan = plan_of(model, args)
    plan.apply(model)
    plan.apply(other)

    def loop(models: Sequence[nn.Module]) -> torch.Tensor:
        loss: torch.Tensor = models[0](*args) * models[1](*args)
        loss.backward()
        planned = models[0](*args)
        planned.backward()
        return loss + planned

    with counting_runs() as runs, no_plan_warnings():
        ours = left_by([model, other], loop)
    assert runs.backward == 3
    assert_same(ours, left_by(twins, loop))
    planner.remove(model)
    assert installed_plan(other) is plan


@pytest.mark.heavy
def test_a_generator_and_a_discriminator() -> None:
    def network(wide_in: int, wide_out: int) -> nn.Module:
        body = [nn.Linear(wide_in, 64), nn.LeakyReLU(0.2, inplace=True), nn.BatchNorm1d(64)]
        more = [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, wide_out)]
        return nn.Sequential(*body, *more)

    torch.manual_seed(0)
    models, real = [network(8, 16), network(16, 1)], torch.randn(64, 16)
    twins = copy.deepcopy(models)
    planner.auto_checkpoint(models[0], (torch.randn(64, 8),), budget="min", solver="sqrt_n")
    planner.auto_checkpoint(models[1], (real.clone().requires_grad_(),), budget="min", solver="sqrt_n")
    judge = F.binary_cross_entropy_with_logits

    def loop(models: Sequence[nn.Module]) -> list[torch.Tensor]:
        generator, discriminator = models
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in models]
        yes, no, losses = torch.ones(64, 1), torch.zeros(64, 1), []
        for _ in range(2):
            fake = generator(torch.randn(64, 8))
            optimizers[1].zero_grad()
            losses.append(judge(discriminator(real), yes) + judge(discriminator(fake.detach()), no))
            losses[-1].backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            losses.append(judge(discriminator(fake), yes))
            losses[-1].backward()
            optimizers[0].step()
        return losses

    with counting_runs() as runs, no_plan_warnings():
        ours = left_by(models, loop)
    assert runs.backward == 2 * (2 + 2)
    assert_same(ours, left_by(twins, loop))


@pytest.mark.heavy
def test_an_average_of_weights_kept_in_a_copy() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        average = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer, left = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            left.append(_step(model, args))
            optimizer.step()
            with torch.no_grad():
                for smooth, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    smooth.lerp_(parameter, 0.1)
            left.append(average(*args))
        return left

    assert_trains_alike(model, args, loop, expected_runs=2)


@pytest.mark.heavy
def test_generating_between_training_steps() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
    words = torch.randint(0, 60, (8, 32))
    kwargs = {"input_ids": words, "labels": words, "use_cache": False}

    def loop(model: Any) -> list[Any]:
        left = []
        for _ in range(2):
            left.append(model(**kwargs).loss)
            left[-1].backward()
            for mode, sampled in ((True, True), (False, False)):
                model.train(mode)
                prompt = words[:2, :4]
                left.append(model.generate(prompt, max_new_tokens=4, do_sample=sampled, pad_token_id=0))
            model.train()
        return left

    plan = plan_of(copy.deepcopy(model), (), kwargs=kwargs)
    assert_trains_alike(model, (), loop, expected_runs=2 * len(plan.graphs), kwargs=kwargs)


# ---- the model changes ------------------------------------------------------------------------------


@pytest.mark.heavy
def test_new_weights_and_a_trip_to_another_device() -> None:
    model, args, _ = layers()

    def loop(model: nn.Module) -> list[torch.Tensor]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        left = [_step(model, args)]
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.load_state_dict(state)
        left.append(_step(model, args))
        model.load_state_dict({name: 2 * value for name, value in state.items()}, assign=True)
        left.append(_step(model, args))
        model.zero_grad()
        model.to("meta").to_empty(device="cpu").float()
        model.load_state_dict(state)
        left.append(_step(model, args))
        return left

    assert_trains_alike(model, args, loop, expected_runs=4)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_after_apply_is_said_and_right(dtype: torch.dtype) -> None:
    model, args, _ = layers()
    twin = copy.deepcopy(model)
    plan = plan_of(model, args)
    plan.apply(model)

    def loop(model: nn.Module) -> torch.Tensor:
        return _step(model.to(dtype), (args[0].to(dtype),))

    larger = pytest.warns(PlanWarning, match="larger than|operations produce")
    with counting_runs() as runs, larger if dtype is torch.float64 else no_plan_warnings():
        ours = left_by(model, loop)
    assert runs.backward == 1
    assert_same(ours, left_by(twin, loop))
