"""Which steps run as recorded CUDA graphs, with what stands in for their recorder: numbers are the unplanned
module's whatever happens between steps, and what is not recorded says so."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import planner
from benchmarks.frontiers.stand_in_recorder import StandIn, stand_in
from planner._torch.cuda.recorder import recorder_for
from planner.choices import CUDA_GRAPHS
from planner.compiled.calls import Calls
from planner.errors import FreedError, InputsChanged, PlanWarning
from planner.planning.options import OptionError
from planner.report.text import as_text
from planner.runtime import recorded_graph, recordings
from planner.user_plan import Plan

pytestmark = pytest.mark.heavy

Tensor = torch.Tensor


class Net(nn.Module):
    """Two layers, with a draw, a normalisation that counts, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.norm(self.drop(self.a(x).tanh().sin()))).square().mean()


class Outputs(Net):
    """The same with results of which the caller makes the loss."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.a(x).tanh().sin())
        return self.b(hidden), hidden.exp()


class Pair:
    """A module that runs as recorded, and its copy, which runs without a plan: after each step they agree."""

    def __init__(self, recorders: list[StandIn], model: nn.Module, *inputs: Any, **options: Any) -> None:
        self.recorders = recorders
        self.planned: Any = model
        self.plain: Any = copy.deepcopy(model)
        key = type(model), str(options), inputs[0].requires_grad
        if key not in _PLANS:
            options = {"budget": "min", "solver": "sqrt_n", "costs": "roofline", **options}
            _PLANS[key] = planner.plan(model, inputs, backend="cudagraphs", unproven=True, **options)
        self.plan = _PLANS[key].apply(model) and _PLANS[key]

    def each(self, change: Callable[[Any], Any]) -> None:
        """Do the same to both, from the same random state; what it returns is equal."""
        state = torch.get_rng_state()
        found = change(self.planned)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        expected = change(self.plain)
        assert torch.equal(after, torch.get_rng_state())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=False)
        for ours, theirs in zip(_state(self.planned), _state(self.plain), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (torch.equal(ours, theirs) and not ours.isnan().any())

    def steps(self, count: int = 1, rows: int = 6, **options: Any) -> None:
        """Train for some steps."""
        for _ in range(count):
            x = torch.randn(rows, 4)
            self.each(lambda model, x=x: train(model, x, **options))  # type: ignore[misc]

    def runs(self) -> list[list[int]]:
        """How often each half ran as recorded, by pool; pools in which nothing was recorded are left out."""
        return [made.runs for made in self.recorders if made.runs]


_PLANS: dict[Any, Plan] = {}


def _state(model: nn.Module) -> list[Tensor | None]:
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def scalar(output: Any) -> Tensor:
    """A loss of all that a module returns."""
    return output if isinstance(output, Tensor) else sum(o.square().mean() for o in output)


def train(
    model: nn.Module,
    x: Tensor,
    *,
    zero: str = "before",
    loss: Callable[[Any], Tensor] = scalar,
    update: bool = True,
) -> Tensor:
    """A step of a training loop."""
    if zero == "before":
        model.zero_grad()
    found = loss(model(x.clone()))
    if zero == "between":
        model.zero_grad()
    found.backward()
    with torch.no_grad():
        for p in model.parameters():
            if update and p.grad is not None:
                p -= 0.01 * p.grad
    return found.detach()


@pytest.fixture(autouse=True)
def recorders() -> Iterator[list[StandIn]]:
    with stand_in() as made:
        yield made


@pytest.fixture
def net(recorders: list[StandIn]) -> Pair:
    return Pair(recorders, Net(), torch.randn(6, 4))


@pytest.fixture
def outputs(recorders: list[StandIn]) -> Pair:
    return Pair(recorders, Outputs(), torch.randn(6, 4), outputs="held")


def says(text: str) -> Any:
    return pytest.warns(PlanWarning, match=f"not as a recorded CUDA graph: .*{text}")


# ---- what runs as recorded ----


def test_programs_of_inductor_run_as_recorded(recorders: list[StandIn]) -> None:
    """``torch.compile(mode="reduce-overhead")`` sets the same option."""
    assert torch._inductor.list_mode_options("reduce-overhead") == {CUDA_GRAPHS: True}
    x, model = torch.randn(4, 6, 4), Net()
    options: dict[str, Any] = {"budget": "min", "solver": "sqrt_n", "costs": "roofline", "unproven": True}
    made = planner.plan(model, (x[0],), backend="inductor", backend_options={CUDA_GRAPHS: True}, **options)
    plan = planner.Plan.loads(made.dumps())  # the option is harmless in a file
    assert plan.whole_step is not None
    assert plan.whole_step.recorded_bytes
    assert any("nobody has run such plans on a GPU" in note for note in plan.notes)

    def trained(model: nn.Module) -> list[Any]:
        plan.apply(model)
        torch.manual_seed(1)
        found = [[train(model, batch), *copy.deepcopy(_state(model))] for batch in x]
        return [*itertools.chain(*found), torch.get_rng_state()]

    other = copy.deepcopy(model)
    with mock.patch.object(recordings, "recorder_for", return_value=None), says("CUDA graphs are a GPU's"):
        expected = trained(other)
    found = trained(model)
    assert all(itertools.starmap(_are_equal, zip(found, expected, strict=True)))
    assert [made.runs for made in recorders if made.runs] == [[3, 3]]


def test_recording_compiled_programs_is_asked_for_on_purpose() -> None:
    options: dict[str, Any] = {"backend": "inductor", "backend_options": {CUDA_GRAPHS: True}}
    with pytest.raises(OptionError, match="backend_options= has not been run on a GPU yet"):
        planner.plan(Net(), (torch.randn(6, 4),), budget="min", **options)
    with pytest.raises(OptionError, match="regions=: expected none with"):
        planner.plan(Net(), (torch.randn(6, 4),), budget="min", regions="auto", unproven=True, **options)


def test_the_first_step_runs_as_it_is_and_later_ones_as_recorded(net: Pair) -> None:
    net.steps(1)
    assert net.runs() == []
    net.steps(4)
    assert net.runs() == [[4, 4]]


def test_parameters_that_change_in_place_are_read_where_they_are(net: Pair) -> None:
    net.steps(3)
    net.each(lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}))
    net.steps(2)
    assert net.runs() == [[4, 4]]


def test_outputs_stay_as_they_were(outputs: Pair) -> None:
    outputs.steps(2)
    kept, then = [], []
    for _ in range(3):
        outputs.planned.zero_grad()
        found = outputs.planned(torch.randn(6, 4))
        kept += [o.detach() for o in found]
        then += [o.detach().clone() for o in found]
        scalar(found).backward()
    assert all(map(torch.equal, kept, then))
    assert outputs.runs() == [[4, 4]]


def test_a_gradient_of_the_input_is_its_own(net: Pair) -> None:
    net.steps(2)
    x = torch.randn(6, 4, requires_grad=True)

    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        return torch.autograd.grad(model(x), x)[0]

    with pytest.warns(PlanWarning, match="requires a gradient"):
        net.each(step)


def test_a_step_behind_another_module(recorders: list[StandIn]) -> None:
    before, x = nn.Linear(4, 4), torch.randn(6, 4)
    pair = Pair(recorders, Net(), before(x))
    for _ in range(4):
        x = torch.randn(6, 4)

        def step(model: nn.Module, x: Tensor = x) -> Tensor:
            before.zero_grad()
            train(model, before(x))
            assert before.weight.grad is not None
            return before.weight.grad.clone()

        pair.each(step)
    assert pair.runs() == [[3, 3]]


def test_tied_weights(recorders: list[StandIn]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    model[2].weight = model[0].weight
    pair = Pair(recorders, model, torch.randn(6, 4), loss=torch.sum, budget="200%")
    pair.steps(4, loss=torch.sum)
    assert pair.runs() == [[3, 3]]


def test_hooks_on_gradients_run(net: Pair) -> None:
    net.each(lambda model: model.a.weight.register_hook(lambda g: 2 * g) and None)
    net.steps(4)
    assert net.runs() == [[3, 3]]


def test_an_optimizer_in_the_backward(net: Pair) -> None:
    def in_backward(parameter: Any) -> None:
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None

    net.each(
        lambda model: [p.register_post_accumulate_grad_hook(in_backward) and None for p in model.parameters()]
    )
    net.steps(4)
    assert net.runs() == [[3, 3]]


def test_evaluation_and_steps_without_gradients_in_between(net: Pair) -> None:
    net.steps(2)
    x = torch.randn(6, 4)
    for _ in range(2):
        net.each(lambda model: model.eval()(x).detach())
        net.each(lambda model: model.train() and None)
        with torch.no_grad():
            net.each(lambda model: model(x))
        net.steps(1)
    assert net.runs() == [[3, 3]]


def test_verify_compares_what_was_recorded(net: Pair) -> None:
    report = planner.verify(net.planned, (torch.randn(6, 4),), repeats=0)
    assert report.ok
    assert report.exact
    assert net.runs() == [[2, 2]]


def test_draws_are_kept_whatever_the_budget() -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    model, x, again = nn.Sequential(*layers), torch.randn(2048, 16), list[set[str]]()
    for backend in ("eager", "cudagraphs"):
        options: Any = {"backend": backend, "encodings": "none", "unproven": True, "costs": "roofline"}
        plan = planner.plan(model, (x,), budget="min", loss=torch.sum, solver="sqrt_n", **options)
        ops = plan.graphs[0].ops
        again.append({ops[i].name for i in plan.graphs[0].backward if ops[i].phase == "forward"})
    eager, kept = (sum("draw_mask" in name for name in names) for names in again)
    assert eager
    assert not kept


# ---- what invalidates a recording ----


def test_a_parameter_that_is_replaced_is_recorded_anew(net: Pair) -> None:
    net.steps(3)
    net.each(lambda model: setattr(model.a.weight, "data", model.a.weight.data + 1))
    net.steps(3)
    assert net.runs() == [[2, 2], [2, 2]]


def test_a_buffer_that_is_replaced_is_recorded_anew(net: Pair) -> None:
    net.steps(3)
    net.each(lambda model: setattr(model.norm, "running_mean", torch.ones(8)))
    net.steps(3)
    assert len(net.runs()) == 2


def test_parameters_that_are_replaced_at_every_step_are_given_up(net: Pair) -> None:
    def move(model: Any) -> None:
        model.a.weight.data = model.a.weight.data + 1

    net.steps(2)
    with says("replaced 4 times"):
        for _ in range(2 * recorded_graph.MOST_RECORDINGS):
            net.each(move)
            net.steps(2)
    made = len(net.runs())
    net.steps(3)
    assert len(net.runs()) == made == recorded_graph.MOST_RECORDINGS


def test_a_parameter_that_is_frozen(net: Pair) -> None:
    net.steps(3)
    net.each(lambda model: model.a.requires_grad_(False) and None)
    with says("other operations"):
        net.steps(3)
    assert net.runs() == [[2, 2]]


def test_autocast_on_and_off(net: Pair) -> None:
    net.steps(3)
    with torch.autocast("cpu", torch.bfloat16), says("other operations"):
        net.steps(1)
    net.steps(2)
    assert net.runs() == [[4, 4]]


def test_settings_of_kernels(net: Pair) -> None:
    net.steps(3)
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(not before)
    try:
        with pytest.warns(PlanWarning):
            net.steps(2)
    finally:
        torch.backends.mkldnn.set_flags(before)
    net.steps(2)
    assert net.runs() == [[4, 4]]


def test_a_plan_that_is_applied_again_records_anew(net: Pair) -> None:
    net.steps(3)
    first = weakref.ref(net.recorders[-1])
    net.plan.apply(net.planned)
    net.recorders.clear()
    gc.collect()
    assert first() is None  # its pool is free
    net.steps(3)
    assert net.runs() == [[2, 2]]


def test_a_plan_that_is_removed(net: Pair) -> None:
    net.steps(3)
    planner.remove(net.planned)
    net.steps(2)
    assert net.runs() == [[2, 2]]


def test_a_plan_that_is_removed_between_forward_and_backward(net: Pair) -> None:
    net.steps(3)

    def removed(output: Tensor) -> Tensor:
        planner.remove(net.planned)
        return output

    net.steps(1, loss=removed)
    net.steps(2)


def test_a_copy_of_the_module_has_a_recording_of_its_own(net: Pair) -> None:
    net.steps(3)
    copied = copy.deepcopy(net.planned)
    other = Pair.__new__(Pair)
    other.recorders, other.planned, other.plain = net.recorders, copied, copy.deepcopy(net.plain)
    other.steps(3)
    net.steps(1)
    assert net.runs() == [[3, 3], [2, 2]]


# ---- what runs as it is, and says so ----


def test_another_shape(net: Pair) -> None:
    net.steps(3)
    with says("other shapes"):
        net.steps(2, rows=5)
    net.steps(2)
    assert net.runs() == [[4, 4]]


def test_another_stream(net: Pair) -> None:
    net.steps(3)
    net.recorders[-1].stream = 1
    with says("another device or stream"):
        net.steps(1)
    net.recorders[-1].stream = 0
    net.steps(1)
    assert net.runs() == [[3, 3]]


def test_another_stream_in_the_backward(net: Pair) -> None:
    def elsewhere(output: Tensor) -> Tensor:
        net.recorders[-1].stream = 1
        return output

    net.steps(3)
    with says("backward runs on another device or stream"):
        net.steps(1, loss=elsewhere)
    net.recorders[-1].stream = 0
    net.steps(1)
    assert net.runs() == [[4, 3]]


def test_a_recording_of_the_users_own(net: Pair) -> None:
    net.steps(3)
    net.recorders[-1].recording = True
    with says("recording of your own"):
        net.steps(1)
    assert net.runs() == [[2, 2]]


def test_two_calls_before_their_backwards(net: Pair) -> None:
    net.steps(2)
    x, y = torch.randn(2, 6, 4)
    with pytest.warns(PlanWarning, match="awaits its backward"):
        net.each(lambda model: (model.zero_grad(), (model(x) + model(y)).backward())[1])
    net.steps(1)
    assert net.runs() == [[3, 3]]


def test_a_call_whose_backward_never_comes(net: Pair) -> None:
    net.steps(2)
    for _ in range(2):
        x = torch.randn(6, 4)
        net.each(lambda model, x=x: (model.zero_grad(), model(x).detach())[1])  # type: ignore[misc]
    net.steps(2)
    assert net.runs() == [[5, 3]]


def test_a_graph_that_is_kept_for_a_second_backward(net: Pair) -> None:
    def twice(output: Tensor) -> Tensor:
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        return output

    net.steps(2)
    with pytest.warns(PlanWarning, match="keeps its graph"):
        net.steps(1, loss=twice)
    net.steps(1)
    assert net.runs() == [[3, 3]]


def test_a_second_backward_without_its_graph_is_an_error(outputs: Pair) -> None:
    outputs.steps(3)
    first, second = outputs.planned(torch.randn(6, 4))
    first.sum().backward()
    with pytest.raises(FreedError):
        second.sum().backward()
    outputs.planned.zero_grad()


def test_a_gradient_that_is_absent(outputs: Pair) -> None:
    outputs.steps(2)
    for _ in range(2):  # the backward of one output runs as it is, on what the recorded forward kept
        outputs.steps(1, loss=lambda found: found[0].square().sum())
    outputs.steps(1)
    assert outputs.runs() == [[4, 2]]


def test_gradients_that_are_zeroed_after_the_forward(net: Pair) -> None:
    with says("gradients of an earlier step are still held"):
        net.steps(5, zero="between")
    assert net.runs() == [[2, 2]]  # every second step


def test_gradients_that_are_added_to_unplanned(net: Pair) -> None:
    with pytest.warns(PlanWarning):
        net.steps(4, zero="never")
    net.steps(2)


def test_gradients_that_are_kept_as_zeros(net: Pair) -> None:
    def zeroed() -> None:
        for _ in range(3):
            net.each(lambda model: model.zero_grad(set_to_none=False))
            net.steps(1, zero="never")

    net.steps(3)
    with says("still held"):
        zeroed()


def test_gradients_that_the_user_keeps_stay_as_they_are(net: Pair) -> None:
    net.steps(2)
    kept: list[Tensor] = []
    then: list[Tensor] = []

    def keep() -> None:
        for _ in range(3):
            found = torch.autograd.grad(net.planned(torch.randn(6, 4)), [*net.planned.parameters()])
            kept.extend(found)
            then.extend(g.clone() for g in found)

    with says("still held"):
        keep()
    assert all(map(torch.equal, kept, then))


def test_a_plan_that_counts_gradients_is_recorded_while_they_are_added_up(recorders: list[StandIn]) -> None:
    pair = Pair(recorders, Net(), torch.randn(6, 4), accumulate=True)
    for _ in range(3):
        pair.each(lambda model: model.zero_grad())
        pair.steps(3, zero="never", update=False)
    assert pair.runs() == [[8, 8]]


def test_an_error_between_forward_and_backward(net: Pair) -> None:
    def fails(_output: Tensor) -> Tensor:
        raise ValueError("no loss")

    net.steps(3)
    state = torch.get_rng_state()
    for model in (net.planned, net.plain):
        torch.set_rng_state(state)
        with pytest.raises(ValueError, match="no loss"):
            train(model, torch.ones(6, 4), loss=fails)
    net.steps(2)
    assert net.runs() == [[5, 4]]


def test_an_error_in_the_backward(net: Pair) -> None:
    def fails(_gradient: Tensor) -> None:
        raise ValueError("no gradient")

    net.steps(3)
    for model in (net.planned, net.plain):
        handle = model.b.weight.register_hook(fails)
        with pytest.raises(ValueError, match="no gradient"):
            train(model, torch.ones(6, 4))
        handle.remove()
        model.zero_grad()
        torch.manual_seed(0)
    net.each(lambda model: model.load_state_dict(net.plain.state_dict()))
    net.steps(2)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_cannot_be_recorded(half: str, net: Pair) -> None:
    original = StandIn.record

    def fails(self: StandIn, function: Any, args: list[Any]) -> Any:
        if len(self.runs) == (half == "backward"):
            if half == "backward":
                function(args)  # what was begun has taken its arguments
            raise RuntimeError("operation not permitted")
        return original(self, function, args)

    net.steps(1)
    with mock.patch.object(StandIn, "record", fails), says("not permitted"):
        net.steps(1)
    net.steps(2)
    assert net.runs() == ([] if half == "forward" else [[1]])


def test_an_input_that_changes_before_the_backward_is_an_error(recorders: list[StandIn]) -> None:
    pair = Pair(recorders, nn.Linear(4, 4), torch.randn(6, 4), loss=torch.sum)
    pair.steps(3, loss=torch.sum)
    x = torch.randn(6, 4)
    found = pair.planned(x).sum()
    x += 1
    with pytest.raises((RuntimeError, InputsChanged), match=r"in.?place"):
        found.backward()


def test_a_forward_that_writes_into_its_input(recorders: list[StandIn]) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Any:
            x.mul_(2)
            return super().forward(x)

    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        given = x.clone()
        model(given).backward()
        return given

    pair = Pair(recorders, Writes(), torch.randn(6, 4))
    for _ in range(4):
        x = torch.randn(6, 4)
        pair.each(step)
    assert pair.runs() == [[3, 3]]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [x.exp(), x.t().sin()], "cannot be recorded"),
        (lambda x: [x.mul_(2).exp(), x.sin()], "writes into an input"),
        (lambda x: [x.exp(), x.cfloat().conj()], "no plain tensor"),
        (lambda x: [x[1:], x.sin()], "shares its memory"),
        (lambda x: [x.to_sparse(), x.sin()], "no plain tensor"),
        (lambda x: [x.exp(), x], "keeps nothing"),
        (lambda x: [x[:0].exp(), x[:0].exp(), x.sin()], ""),  # what has no elements shares no memory
    ],
)
def test_a_function_that_cannot_be_recorded(function: Callable[[Tensor], list[Any]], why: str) -> None:
    graph = torch.fx.Graph()
    graph.output([graph.placeholder("x")]).meta["user_outputs"] = 1 if why else 2
    said: list[str] = []
    weight, call = nn.Parameter(torch.ones(1)), Calls(said.append)
    rules = recorded_graph.RecordedGraph(
        weight.device, StandIn, lambda: [weight], call, said.append, copies_gradients=False
    )
    run = rules.forward(torch.fx.GraphModule({}, graph), lambda args: function(args[0]))
    # What is expanded lies over itself, and nothing can be copied there.
    given = torch.ones(2, 1).expand(2, 2) if "cannot" in why else torch.ones(2, 2)
    for _ in range(3):
        found = run([given])[0]
        assert found is not None
    assert [why in line for line in said] == [True] * bool(why)


def test_a_forward_that_is_several_graphs_has_several_pools(recorders: list[StandIn]) -> None:
    class Breaks(Net):
        def forward(self, x: Tensor) -> Any:
            x = self.norm(self.a(x).tanh().sin())
            torch._dynamo.graph_break()
            return self.b(self.drop(x.cos())).square().mean()

    pair = Pair(recorders, Breaks(), torch.randn(6, 4))
    pair.steps(4)
    assert pair.runs() == [[3, 3], [3, 3]]
    whole = pair.plan.whole_step
    assert whole is not None
    assert whole.recorded_bytes > 6 * 8 * 4 * 4  # four times what goes from one to the other
    with says("still held"):
        pair.steps(2, zero="between")
    pair.steps(1, loss=lambda found: found * found)


def test_layers_that_share_a_graph(recorders: list[StandIn]) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            torch._dynamo.graph_break()
            return super().forward(x).tanh().sin()

    model = nn.Sequential(Layer(4, 4), Layer(4, 4))
    pair = Pair(recorders, model, torch.randn(6, 4), loss=torch.sum)
    with says("layers share a graph"):
        pair.steps(3, loss=torch.sum)
    assert pair.runs() == []


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: torch.ops._c10d_functional.all_reduce.default(x, "sum", "0"), "ranks take part"),
        (lambda x: torch.ops.aten.nonzero.default(x), "found in data"),
        (lambda x: torch.ops.aten._local_scalar_dense.default(x), "found in data"),
    ],
)
def test_what_a_recording_must_not_have(call: Callable[[Tensor], Any], why: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxy: Any = torch.fx.Proxy(x, tracer)
    graph.output(call(proxy).node)
    found = recorded_graph.why_unrecordable(torch.fx.GraphModule({}, graph), torch.device("cpu"))
    assert found is not None
    assert why in found


def test_without_a_gpu_it_says_so() -> None:
    pair = Pair([], Net(), torch.randn(6, 4))
    with mock.patch.object(recordings, "recorder_for", recorder_for), says("CUDA graphs are a GPU's"):
        pair.steps(2)


def test_the_prediction_counts_what_recordings_hold() -> None:
    x, model = torch.randn(6, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    options: dict[str, Any] = {"budget": "min", "solver": "sqrt_n", "unproven": True, "loss": torch.sum}
    plans: list[Plan] = [
        planner.plan(model, (x,), backend="cudagraphs", device="H100", accumulate=added, **options)
        for added in (False, True)
    ]
    for plan in plans:
        whole = plan.whole_step
        assert whole is not None
        output = 2 * 512  # the copy that is handed out, and that of its gradient
        library = whole.library_bytes
        assert whole.recorded_bytes == 512 + output + plan.resident.gradient_bytes + library
        assert whole.optimizer_step_bytes == whole.forward_backward_bytes  # the pool stays
        assert whole.arena == []
        assert "of recorded graphs, beside" in as_text(plan.summary())
        assert whole.reserved_bytes >= whole.allocated_bytes + library + whole.recorded_bytes
