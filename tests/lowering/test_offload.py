"""Results that are kept in files until the backward fetches them: the same bits, and the predicted peak."""

import copy
import gc
import json
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.fx import Graph as FxGraph
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner import Plan, PreparedStep
from planner._torch.execution import host_place
from planner._torch.execution.host_place import HostPlace
from planner.costs.devices import Device, find_device
from planner.costs.roofline import roofline
from planner.errors import PlannerError
from planner.lowering.transfers import check_transfers
from planner.planning import solve_many
from planner.planning.encodings import Solved, offers_to_send
from planner.planning.make_plan import make_plan
from planner.planning.prepared import Prepared
from planner.planning.solve import room_bytes
from planner.problem.encodings import PackedProblem, packed
from planner.problem.link import overlapped
from planner.report.page.data import page_data
from planner.runtime import install
from solvers.model.constraints import Constraints
from solvers.model.just_in_time import recompute
from solvers.model.schedule import check, simulate
from solvers.model.solution import Solution, Status
from tests.browser import run_in_browser

pytestmark = pytest.mark.heavy

X = torch.randn(512, 64)


class Block(nn.Module):
    def __init__(self, width: int, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.widen, self.narrow, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.dropout(F.gelu(self.widen(self.norm(x)))))


def blocks(dropout: nn.Module | None = None, count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64, dropout or nn.Dropout(0.1)) for _ in range(count))).train()


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def prepared(model: nn.Module) -> planner.PreparedStep:
    return planner.prepare(model, X, loss=squares, offload="disk", backend="graph", costs="roofline")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return prepared(blocks()).plan("min", solver="sqrt_n")


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def forward(model: nn.Module, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return squares(model(X))


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def test_bits_and_bytes_are_as_promised_below_the_least_peak(plan: Plan) -> None:
    model = blocks()
    least = planner.plan(
        model, (X,), budget="min", loss=squares, solver="sqrt_n", backend="graph", encodings="none"
    )
    assert plan.predicted.peak_bytes < least.predicted.peak_bytes
    assert plan.target.offload == "disk"
    assert plan.whole_step.host_bytes > 0
    fetched = len(plan.graphs[0].packed)
    assert f"The backward fetches {fetched} results, " in "".join(page_data(plan)["story"])
    report = planner.verify(model, (X,), plan=Plan.loads(plan.dumps()), loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_the_page_shows_what_is_on_its_way_as_the_plan_has_it(plan: Plan) -> None:
    data, record, places = page_data(plan), plan.graphs[0], plan.step.places()
    sent = [places[bar["to"][0]][2] for bar in data["link"]]
    assert sent == record.packed
    for bar, last in zip(data["link"], record.completed, strict=True):
        assert [op for graph, _, op in places[: bar["to"][1]] if graph >= 0][-1] == last
    begun = sorted((step, op) for bar, op in zip(data["link"], sent, strict=True) for step, _ in bar["back"])
    assert [op for _, op in begun] == [op for op in record.backward if op in record.packed]
    assert all(begin < read for bar in data["link"] for begin, read in bar["back"])


@pytest.mark.browser
def test_the_bars_are_drawn_below_the_steps(plan: Plan, tmp_path: Path) -> None:
    look = "await new Promise(done => setTimeout(done, 500)); return JSON.stringify("
    look += "[...document.querySelectorAll('#link rect')].map(bar => bar.getBoundingClientRect().left))"
    seen = run_in_browser(plan.report(), look, tmp_path)
    assert seen.console == []
    places, link = json.loads(seen.result), page_data(plan)["link"]
    bars = [bar["to"][0] for bar in link] + [step for bar in link for step, _ in bar["back"]]
    assert len(places) == len(bars)
    assert len(set(places)) == len(set(bars))


def in_regions() -> planner.PreparedStep:
    return planner.prepare(
        blocks(count=4), X, loss=squares, offload="disk", backend="graph", costs="roofline", regions="*"
    )


def test_what_one_region_hands_on_to_the_next_leaves_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_regions()
    plan = step.plan("min", solver="sqrt_n")
    assert [g.ops[0].name for g in plan.graphs if 0 in g.packed] == ["input"]
    kept = [p for p in step._prepared.packings if not p.handed]
    less = PreparedStep(replace(step._prepared, packings=tuple(kept))).plan("min", solver="sqrt_n")
    assert plan.predicted.dynamic_peak_bytes < less.predicted.dynamic_peak_bytes
    for one in (plan, decided_at_random(step._prepared, random.Random(0))):
        assert any(g.handed_inputs and 0 in run.packed for g in one.graphs for run in g.programs)
        report = planner.verify(blocks(count=4), (X,), plan=Plan.loads(one.dumps()), loss=squares)
        assert report.ok, report.problems
        assert report.measured_dynamic_peak_bytes == one.predicted.dynamic_peak_bytes


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_is_sent_and_however_slowly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, model = random.Random(seed), blocks()

    def slowly(tensors: list[torch.Tensor]) -> None:
        time.sleep(draw.random() * 4e-3)
        whole(tensors)
        time.sleep(draw.random() * 2e-3)

    whole = host_place._copy
    monkeypatch.setattr(host_place, "_copy", slowly)
    random_plan = decided_at_random(prepared(model)._prepared, draw)
    report = planner.verify(model, (X,), plan=random_plan, loss=squares)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == random_plan.predicted.dynamic_peak_bytes


def decided_at_random(step: Prepared, draw: random.Random) -> Plan:
    """A plan that sends, keeps and recomputes at random, over a link of any speed."""
    speed = 10 ** draw.uniform(-1.5, 1.5)
    some = [
        replace(p, send_seconds=p.send_seconds * speed, fetch_seconds=p.fetch_seconds * speed)
        for p in step.packings
        if draw.random() < 0.7
    ]
    offer = packed(step.problem, some)
    kept = np.array([draw.random() < 0.5 for _ in offer.problem.graph.values])
    schedule = recompute(offer.problem.graph, kept)
    made = packed(step.problem, offer.unpacked_in(schedule))
    schedule = made.follow(offer, schedule)
    problem, moved = overlapped(step.problem, made, schedule)
    check(problem.graph, moved)
    before, after = simulate(made.problem.graph, schedule), simulate(problem.graph, moved)
    runs = np.bincount(schedule, minlength=len(made.forms))
    one_by_one = sum(
        p.send_seconds + p.fetch_seconds * runs[made.row_of["unpack", p.row]] for p in made.packings
    )
    assert made.packings
    assert after.peak_bytes <= before.peak_bytes
    assert before.seconds <= after.seconds + 1e-9
    assert after.seconds <= before.seconds + one_by_one + 1e-9
    solution = Solution("auto", Status.FEASIBLE, moved, after.peak_bytes, after.seconds, 0.0)
    return Plan.of(make_plan(step, Solved(solution, problem), step.budget("min")))


class Clock(TorchDispatchMode):
    """What a step takes by the seconds of a device's roofline and link, whatever this machine takes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self._costs = device, roofline(device)
        self.now = self.waited = self._out = self._back = 0.0
        self._until: dict[int, float] = {}
        self._transfers = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or plans do not run under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._transfers:
            self.now += self._costs.seconds(func, args, kwargs or {}, out)
        return out

    @contextmanager
    def transfer(self) -> Iterator[None]:
        self._transfers = True
        yield
        self._transfers = False

    def begin(self, host: HostPlace, name: str, tensor: torch.Tensor) -> torch.Tensor:
        with self.transfer():
            result: torch.Tensor = getattr(HostPlace, name)(host, tensor)
        if name == "send":
            self._out = until = max(self._out, self.now) + tensor.nbytes / self._device.to_host
        else:
            self._back = until = max(self._back, self.now) + tensor.nbytes / self._device.from_host
        self._until[id(result)] = until
        return result

    def wait(self, host: HostPlace, name: str, *tensors: torch.Tensor) -> torch.Tensor:
        wait = max(0.0, self._until.pop(id(tensors[0])) - self.now)
        self.now += wait
        self.waited += wait
        result: torch.Tensor = getattr(HostPlace, name)(host, *tensors)
        return result


def test_compute_waits_as_long_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(find_device("cpu"), to_host=0.6e9, from_host=1e9)
    clock, model = Clock(device), blocks(nn.Identity())  # own operators of masks are several calls

    class Clocked(HostPlace):
        def send(self, tensor: torch.Tensor) -> torch.Tensor:
            return clock.begin(self, "send", tensor)

        def sent(self, *tensors: torch.Tensor) -> torch.Tensor:
            return clock.wait(self, "sent", *tensors)

        def fetch(self, kept: torch.Tensor) -> torch.Tensor:
            return clock.begin(self, "fetch", kept)

        def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
            return clock.wait(self, "fetched", tensor)

    monkeypatch.setattr(install, "HostPlace", Clocked)
    plan = planner.plan(
        model, (X,), budget="min", loss=squares, solver="sqrt_n", offload="disk", device=device,
        backend="graph", costs="roofline",
    )  # fmt: skip
    plan.apply(model)
    forward(model).backward()  # which compiles
    model.zero_grad()
    begin, waited = clock.now, clock.waited
    with clock:
        forward(model).backward()
    assert clock.waited - waited > 0.3 * plan.predicted.seconds
    assert clock.now - begin == pytest.approx(plan.predicted.seconds, rel=1e-6)


def test_steps_of_all_kinds_find_what_they_sent(plan: Plan, tmp_path: Path) -> None:
    model, unplanned = blocks(), blocks()
    expected = [gradients(unplanned, forward(unplanned, seed)) for seed in (1, 2)]
    plan.apply(model, offload_folder=tmp_path)
    forward(model)  # whose backward never comes
    first, second = forward(model, 1), forward(model, 2)  # two before a backward
    with torch.no_grad():
        model(X)
    assert same(gradients(model, second), expected[1])
    again = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
    assert same(list(again), expected[0])
    assert same(gradients(model, first), expected[0])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(copied, forward(copied)), expected[0])
    assert list(tmp_path.iterdir()) == []
    planner.remove(model)
    assert same(gradients(model, forward(model)), expected[0])


def test_the_host_takes_what_the_plan_says(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[HostPlace] = []
    made = HostPlace.__init__
    monkeypatch.setattr(HostPlace, "__init__", lambda place, *a: (places.append(place), made(place, *a))[1])
    model = plan.apply(blocks())
    for _ in range(3):
        forward(model).backward()
        gc.collect()
    assert [place.bytes for place in places] == [plan.whole_step.host_bytes]


def test_verify_keeps_results_where_the_plan_was_applied_to(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = set[Path]()
    made = HostPlace.__init__
    monkeypatch.setattr(
        HostPlace, "__init__", lambda place, *a: (made(place, *a), folders.add(place.folder))[0]
    )
    model = plan.apply(blocks(), offload_folder=tmp_path)
    assert planner.verify(model, (X,), loss=squares, repeats=0).ok
    assert folders == {tmp_path}


def test_a_folder_that_is_not_there_is_an_error_and_leaves_the_module_alone(
    plan: Plan, tmp_path: Path
) -> None:
    model, twin = blocks(), blocks()
    with pytest.raises(
        PlannerError, match=r"offload_folder='.*away': no file can be made there .*name a fold"
    ):
        plan.apply(model, offload_folder=tmp_path / "away")
    assert same(gradients(model, forward(model)), gradients(twin, forward(twin)))


def test_a_folder_without_room_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    place = HostPlace(tmp_path)
    monkeypatch.setattr(host_place.os, "posix_fallocate", full)
    with pytest.raises(PlannerError, match=r"no room for 256 more bytes.*No space left.*offload_folder="):
        place.send(torch.randn(64))


def test_files_of_other_shapes_do_not_add_up(tmp_path: Path) -> None:
    place = HostPlace(tmp_path)
    for count in (100, 200, 300, 200):
        tensor = torch.randn(count)
        kept = place.sent(place.send(tensor), tensor)
        assert torch.equal(place.fetched(place.fetch(kept)), tensor)
        assert place.bytes == 4 * count
        del kept


def test_an_error_of_a_copy_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensors: list[torch.Tensor]) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(host_place, "_copy", broken)
    place, tensor = HostPlace(), torch.zeros(64)
    kept = place.send(tensor)
    with pytest.raises(OSError, match="the disk is gone"):
        place.sent(kept, tensor)


def test_strides_and_numbers_come_back() -> None:
    place = HostPlace()
    for tensor in (torch.randn(4, 6).t(), torch.randn(3, 5).bfloat16(), torch.ones(2, 3) > 0):
        kept = place.sent(place.send(tensor), tensor)
        back = place.fetched(place.fetch(kept))
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)


def test_a_graph_that_reads_too_early_is_found() -> None:
    place, graph = HostPlace(), FxGraph()
    kept = graph.placeholder("kept")
    fetched = graph.call_function(place.fetch, (kept,))
    graph.output(graph.call_function(torch.neg, (fetched,)))
    with pytest.raises(AssertionError):
        check_transfers(graph, place)


def test_what_cannot_be_is_refused() -> None:
    model = blocks()
    for given, match in (
        ({"offload": "tape"}, "offload='tape'"),
        ({"offload": "host"}, "expected 'none' or 'disk' for device cpu"),
        ({"offload": "disk", "device": "H100"}, "expected 'none' or 'host' for device H100"),
        ({"offload": "disk", "backend": "replay"}, "leave backend= out"),
        ({"offload": "disk", "host_budget": "60%"}, "host_budget='60%'"),
        ({"offload": "disk", "host_budget": -1}, "host_budget=-1: expected bytes"),
        ({"host_budget": "1GiB"}, "host_budget=: expected none"),
    ):
        with pytest.raises(PlannerError, match=match):
            planner.plan(model, (X,), budget="min", loss=squares, **given)  # type: ignore[arg-type]


def test_no_more_than_the_host_budget_is_sent(plan: Plan) -> None:
    budget = plan.whole_step.host_bytes // 2
    step = planner.prepare(
        blocks(), X, loss=squares, offload="disk", host_budget=budget, backend="graph", costs="roofline"
    )
    within = step.plan("70%")
    assert 0 < within.whole_step.host_bytes <= budget
    # The link carries the rest beside the step, so the bound is what the step takes.
    assert within.solver.bound_seconds == pytest.approx(within.no_recompute.seconds)
    assert within.solver.bound_covers == "every schedule"


def test_what_the_programs_of_the_bound_send_is_offered_and_the_bound_counts_the_link() -> None:
    device = replace(find_device("cpu"), to_host=1e9, from_host=1e9)
    step = planner.prepare(
        blocks(nn.Identity(), 4),
        X,
        loss=squares,
        offload="disk",
        device=device,
        backend="graph",
        costs="roofline",
    )
    inside, nothing = step._prepared, Constraints()
    others = offers_to_send(inside, nothing)
    more = offers_to_send(inside, nothing, room_bytes(inside.budget("65%"), inside))[len(others) :]
    assert more
    assert all(offer.packings != other.packings for offer in more for other in others)
    plan = step.plan("65%")
    assert plan.solver.bound_covers == "every schedule"
    assert plan.no_recompute.seconds < plan.solver.bound_seconds <= plan.predicted.seconds


class Words(nn.Module):
    """Blocks with a loss that can be computed in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(500, 64), blocks(), nn.Linear(64, 500)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.words(words))).flatten(0, 1), words.flatten())


def test_a_step_with_its_loss_in_pieces_sends_too() -> None:
    words, model = torch.randint(0, 500, (8, 128)), Words().train()
    step = planner.prepare(
        model, (words,), offload="disk", split="loss", outputs="dropped", backend="graph", costs="roofline"
    )
    plan = step.plan("min")
    assert plan.graphs[0].split is not None
    assert plan.whole_step.host_bytes
    report = planner.verify(model, (words,), plan=plan)
    assert report.ok, report.problems
    assert report.measured_dynamic_peak_bytes == plan.predicted.dynamic_peak_bytes


def test_a_sweep_sends_too() -> None:
    plans = planner.sweep(
        blocks(),
        (X,),
        budgets=["min", "70%"],
        loss=squares,
        offload="disk",
        costs="roofline",
    )
    assert all(plan.whole_step.host_bytes for plan in plans)


def test_a_sweep_does_not_get_slower_where_a_smaller_budget_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    offers, asked = solve_many.offers_to_send, []

    def to_the_first(*args: Any) -> list[PackedProblem]:
        asked.append(args)
        return offers(*args) if len(asked) == 1 else []

    monkeypatch.setattr(solve_many, "offers_to_send", to_the_first)
    budgets = ["70%", "71%"]
    plans = planner.sweep(blocks(), (X,), budgets=budgets, loss=squares, offload="disk", costs="roofline")
    small, large = sorted(plans, key=lambda plan: plan.target.budget_text)
    assert small.whole_step.host_bytes
    assert large.predicted.seconds <= small.predicted.seconds


def test_plans_for_a_gpu_say_what_they_would_take_and_are_not_run_yet() -> None:
    with torch.device("meta"):
        model = blocks(count=4)
    made = planner.plan(
        model, (X.to("meta"),), budget="min", loss=squares, solver="sqrt_n", device="H100", offload="host"
    )
    assert made.whole_step.host_bytes > 0
    with pytest.raises(PlannerError, match="is not run yet: plan with"):
        made.apply(model)


def test_the_page_of_a_plan_that_fetches_what_its_step_does_not_is_refused(plan: Plan) -> None:
    record = plan.graphs[0]
    again = {op for graph, _, op in (plan.step.places()[row] for row in plan.step.replays) if graph == 0}
    op = next(i for i in range(record.forward_length) if i not in again)
    changed = record.model_copy(update={"packed": [*record.packed, op]})
    with pytest.raises(planner.PlanFileError, match=rf"graphs\[0\].packed: operation {op} is not fetched"):
        page_data(plan.model_copy(update={"graphs": [changed]}))


def test_a_forked_process_has_threads_and_blocks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place, tensor = HostPlace(), torch.randn(64)
    kept = place.sent(place.send(tensor), tensor)
    threads, taken = place._to_host, place.bytes
    monkeypatch.setattr(host_place.os, "getpid", lambda: -1)
    again = place.sent(place.send(tensor), tensor)
    assert place._to_host is not threads
    assert place.bytes == taken
    assert torch.equal(place.fetched(place.fetch(again)), tensor)
    del kept
    assert not any(place._free.values())  # a block goes back to the process that made it
