"""What a recorder notes of a step."""

import pytest
import torch
import torch.nn as nn

import planner
from planner._torch import fake
from planner.graph.replay.rng import generator_state_bytes
from planner.training_step.recorder import Recording, StepRecorder


def recorded(*parameters: torch.Tensor) -> Recording:
    recorder = StepRecorder(fake.fake_mode(), parameters)
    with recorder:
        torch._foreach_add_(list(parameters), 1.0)
        torch._foreach_mul(list(parameters), 2.0)
        parameters[0] + parameters[0]
    return recorder.recording


def test_those_of_one_call_differ_and_calls_share_them() -> None:
    added, doubled, summed = recorded(*(torch.zeros(3) for _ in range(4))).calls
    lists = [added.args[0], doubled.args[0]]
    assert [len({id(t) for t in tensors}) for tensors in lists] == [4, 4]
    assert len({t.untyped_storage()._cdata for t in lists[0]}) == 4
    assert {id(t) for t in lists[0]} == {id(t) for t in lists[1]}
    assert summed.args[0] is not summed.args[1]


def test_results_are_no_arguments() -> None:
    recording = recorded(torch.zeros(3), torch.zeros(3))
    arguments = {id(t) for t in recording.calls[1].args[0]}
    assert not arguments & {id(t) for t in recording.outputs[1]}


def test_layouts_are_told_apart() -> None:
    wide = torch.zeros(2, 6)
    there = [torch.zeros(2, 3), torch.zeros(3, 2).t(), wide[:, :3], wide[:, 3:], torch.zeros(2, 3).double()]
    examples = recorded(*there).calls[1].args[0]
    for made, like in zip(examples, there, strict=True):
        assert made.shape == like.shape
        assert made.stride() == like.stride()
        assert made.storage_offset() == like.storage_offset()
        assert made.dtype == like.dtype
        assert made.untyped_storage().nbytes() == like.untyped_storage().nbytes()


def test_sums_that_hooks_make_are_tensors_of_their_own() -> None:
    """The engine adds into a gradient that it alone holds; Python code that adds two makes a third."""
    made: list[torch.Tensor] = []
    with fake.fake_mode():
        x = torch.zeros(8, 8, requires_grad=True)
    recorder = StepRecorder(fake.fake_mode(), [x])

    def add_up(gradient: torch.Tensor) -> None:
        made.append(made.pop() + gradient if made else gradient * 2)

    with recorder:
        y = x.sin()
        y.register_hook(add_up)
        z = y.cos()
        z.register_hook(add_up)
        (z.sum() + (y * y).sum()).backward()
    names = [str(recorder.recording.calls[e.call].func) for e in recorder.recording.events if e.backward]
    assert names.count("aten.add.Tensor") == 2  # both gradients of the product, and the hook's
    assert names.count("aten.add_.Tensor") == 1  # that of the cosine, into their sum


def test_what_is_on_the_host_takes_nothing_of_a_gpu() -> None:
    with fake.fake_mode():
        x = torch.zeros(3, device="cuda")
        recorder = StepRecorder(fake.fake_mode(), [x])
        with recorder:
            kept = [x + 1, torch.zeros(3), torch.get_rng_state()]
    assert [(s.kind, s.bytes) for s in recorder.recording.storages] == [("cuda", 12), ("cpu", 0), ("cpu", 0)]
    del kept


@pytest.mark.parametrize("here", [True, False])
def test_states_of_generators_are_on_the_host(here: bool) -> None:
    """In a step that is recorded on the CPU for a GPU, all else is taken to be on that."""
    recorder = StepRecorder(fake.fake_mode(), [], numbers=here)
    with recorder:
        kept = [torch.zeros(3), torch.get_rng_state()]
    state = torch.get_rng_state().nbytes if here else 0
    assert [s.bytes for s in recorder.recording.storages] == [12, state]
    assert generator_state_bytes("cuda") == generator_state_bytes("cuda+cpu") == 0
    del kept


class _Attributes(nn.Module):
    """Reads a tensor that is neither parameter nor buffer, and writes constants into one that it makes."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.table = torch.randn(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.data = data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.empty(40, dtype=torch.long)
        shifted[0] = 3
        shifted[1:] = torch.tensor([2, 1, 0]).repeat(13)
        if self.data and x[0, 0] > 1e9:
            return x.sum()
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x + self.table.view(1, 40, 16).expand(4, -1, -1).flatten(0, 1)).relu()
        torch._dynamo.graph_break()
        return x.square().mean() * shifted.float().mean()


_TABLE = torch.linspace(0, 1, 500)


class _OfAFile(nn.Module):
    """Reads a part of a tensor that is neither an attribute nor an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * _TABLE[:64]
        return torch.where(_TABLE[100:164].view(8, 8)[:, :1] > 0.2, y[:8], 0.0).sum() + y.sum()


def test_parts_of_what_functions_refer_to_take_nothing() -> None:
    model, x = _OfAFile(), torch.randn(256, 64)
    plan = planner.plan(model, (x,), budget="100%")
    report = planner.verify(model, (x,), plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.baseline_measured_dynamic_peak_bytes == report.baseline_predicted_dynamic_peak_bytes
    assert report.measured_dynamic_peak_bytes == report.predicted_dynamic_peak_bytes


def test_what_is_written_and_was_there_takes_nothing() -> None:
    there, other = torch.zeros(4), torch.ones(4)
    mode = fake.fake_mode()
    recorder = StepRecorder(mode, [])
    with mode, recorder:
        held = there.copy_(other)
        held.add_(1)
        made = torch.add(other, 1)
        made.copy_(there)
    assert [storage.bytes for storage in recorder.recording.storages] == [16]


@pytest.mark.heavy
@pytest.mark.parametrize(("data", "budget"), [(False, "min"), (True, "100%")])
def test_attributes_are_there_before_the_step_and_constants_go_with_it(data: bool, budget: str) -> None:
    torch.manual_seed(0)
    model, args = _Attributes(data), (torch.randn(160, 16),)
    plan = planner.plan(model, args, budget=budget)
    report = planner.verify(model, args, plan=plan, repeats=0)
    assert report.ok, report.problems
    assert report.baseline_predicted_dynamic_peak_bytes == report.baseline_measured_dynamic_peak_bytes
    assert report.predicted_dynamic_peak_bytes == report.measured_dynamic_peak_bytes
