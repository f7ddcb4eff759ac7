"""A plan that is made while other code runs, as in a hook of a backward, is the one made by itself."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import planner
from planner.runtime.install import installed_plan
from tests.side_by_side import Layers, layers, no_plan_warnings

Do = Callable[[], object]


def _leaf() -> Tensor:
    return torch.ones(1, requires_grad=True)


def in_a_hook(do: Do) -> None:
    result = _leaf() * 1

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            do()

    result.register_hook(hook)
    result.sum().backward()


def in_a_hook_after_accumulation(do: Do) -> None:
    leaf = _leaf()

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            do()

    leaf.register_post_accumulate_grad_hook(hook)
    (leaf * 2).sum().backward()


def in_a_backward_of_its_own(do: Do) -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                do()
            return gradient

    Identity.apply(_leaf()).sum().backward()  # type: ignore[no-untyped-call]


def _in_recomputation(do: Do, reentrant: bool) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            do()
        return (x * 2).sin()

    checkpoint(function, _leaf(), use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2


def in_recomputation(do: Do) -> None:
    _in_recomputation(do, False)


def in_reentrant_recomputation(do: Do) -> None:
    _in_recomputation(do, True)


def in_a_backward_in_a_backward(do: Do) -> None:
    in_a_hook(lambda: in_a_hook(do))


def in_another_thread(do: Do) -> None:
    thread = threading.Thread(target=in_a_hook, args=(do,))
    thread.start()
    thread.join()


def in_a_forward_hook(do: Do) -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: do() and None)
    layer(torch.ones(1, 2))


def under_hooks_on_saved_tensors(do: Do) -> None:
    with save_on_cpu():
        do()


def with_gradients_on_again(do: Do) -> None:
    with torch.no_grad(), torch.enable_grad():
        do()


PLACES = [
    in_a_hook,
    in_a_hook_after_accumulation,
    in_a_backward_of_its_own,
    in_recomputation,
    in_reentrant_recomputation,
    in_a_backward_in_a_backward,
    in_another_thread,
    in_a_forward_hook,
    under_hooks_on_saved_tensors,
    with_gradients_on_again,
]


def _told(plan: planner.Plan) -> dict[str, Any]:
    told = plan.model_dump(mode="json")
    for seconds in ("capture_seconds", "solve_seconds"):
        told["solver"].pop(seconds)
    return told


def _made_of_small_layers() -> planner.Plan:
    torch.manual_seed(0)
    return planner.plan(Layers(2), (torch.randn(64, 32),), budget="80%", costs="roofline")


@pytest.fixture(scope="module")
def outside() -> planner.Plan:
    return _made_of_small_layers()


@pytest.mark.parametrize("place", PLACES)
def test_the_plan_is_that_made_outside(place: Callable[[Do], None], outside: planner.Plan) -> None:
    made = []
    place(lambda: made.append(_made_of_small_layers()))
    assert _told(made[0]) == _told(outside)


@pytest.mark.heavy
def test_layers_are_left_out_of_the_recording_there_too() -> None:
    torch.manual_seed(0)
    model, x = Layers(24), torch.randn(256, 32)
    plans = []

    def make() -> None:
        plans.append(planner.plan(model, (x,), budget="60%", costs="roofline", regions="auto"))

    make()
    in_a_hook(make)
    assert _told(plans[0]) == _told(plans[1])


@contextmanager
def _hooked(encoded: Tensor, then: Callable[[Tensor], None]) -> Iterator[Tensor]:
    """What is encoded without gradients, as a leaf whose gradient is handed to ``then``."""
    leaf = encoded.detach().requires_grad_()

    def hook(gradient: Tensor) -> None:
        with torch.enable_grad():
            then(gradient)

    handle = leaf.register_hook(hook)
    yield leaf
    handle.remove()


class Encoder(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _step_of_cached_gradients(model: nn.Module, x: Tensor) -> None:
    """Chunks are encoded without gradients; when their gradient is there they run again, in its hook."""
    model.zero_grad()
    state = torch.get_rng_state()
    with torch.no_grad():
        encoded = model(x)

    def again(gradient: Tensor) -> None:
        torch.set_rng_state(state)
        model(x).backward(gradient)

    with _hooked(encoded, again) as leaf:
        (leaf @ leaf.T).logsumexp(1).mean().backward()


def test_a_model_that_is_first_called_in_a_hook_is_planned_within_its_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, (x,), _ = layers(Encoder)
    eager = copy.deepcopy(model)
    outside = planner.plan(copy.deepcopy(model), (x,), budget="80%", costs="roofline")
    planner.auto_checkpoint(model, budget="80%", costs="roofline")
    for seed in (1, 2):
        torch.manual_seed(seed)
        _step_of_cached_gradients(eager, x)
        torch.manual_seed(seed)
        with no_plan_warnings():
            _step_of_cached_gradients(model, x)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
    made = installed_plan(model)
    assert made is not None
    assert made.predicted.peak_bytes == outside.predicted.peak_bytes
    assert "Encoder planned for 80%" in capsys.readouterr().err
