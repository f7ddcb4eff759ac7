"""Segments that are reserved before a step: how they are found, and that they are there when it begins."""

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.allocator import training_loop
from planner.allocator.arena import (
    MOST_EVENTS,
    THOROUGH_EVENTS,
    Event,
    LargePool,
    Recorder,
    find_arena,
    most_in_use,
)
from planner.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from planner.allocator.recorded import RecordedRun, arena_of_run
from planner.allocator.training_loop import arena_of, reservation, run
from planner.costs.devices import find_device
from planner.planning.options import PlanOptions
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import plan_prepared
from planner.runtime.arena import Arena, CudaMemory, Segments
from planner.training_step.step import Step
from planner.user_plan import Plan
from tests.planning.test_reserved import MIB, mean_square

SIZES = (1000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB, 64 * MIB, 100 * MIB + 512)


def random_loop(draw: random.Random, length: int) -> Iterator[Event]:
    """Allocations by number and bytes, and frees, twice the same, as steps of a loop are."""
    one, live, count = list[Event](), list[int](), 0
    for _ in range(length):
        if live and draw.random() < 0.5:
            one.append((live.pop(draw.randrange(len(live))), 0))
        else:
            count += 1
            live.append(count)
            one.append((count, draw.choice(SIZES) + 512 * draw.randrange(3)))
    one += [(number, 0) for number in live]
    yield from one
    yield from ((number + count, size) for number, size in one)


def recorded(loop: list[Event]) -> Recorder:
    recorder, numbers = Recorder(), dict[int, int]()
    for number, size in loop:
        if size:
            numbers[number] = recorder.malloc(size)
        else:
            recorder.free(numbers.pop(number))
    return recorder


def reserved(before: list[int], segments: tuple[int, ...], loop: list[Event]) -> int:
    """What the whole allocator reserves; no block may overlap another."""
    allocator = CachingAllocator()
    here: dict[int, tuple[int, int]] = {~i: (allocator.malloc(size), size) for i, size in enumerate(before)}
    for size in segments:
        allocator.free(allocator.malloc(size))
    for number, size in loop:
        if size:
            here[number] = allocator.malloc(size), size
        else:
            allocator.free(here.pop(number)[0])
        ranges = sorted((address, address + size) for address, size in here.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    return allocator.reserved_bytes


@pytest.mark.heavy
def test_no_sequence_reserves_more_with_an_arena() -> None:
    draw, saved = random.Random(0), 0
    for _ in range(10_000):
        before = [draw.choice(SIZES) for _ in range(draw.randrange(3))]
        loop = list(random_loop(draw, draw.randrange(12)))
        there = Recorder()
        for size in before:
            there.malloc(size)
        arena = find_arena(there.events, recorded(loop).events, 1000)
        without, with_ = (reserved(before, segments, loop) for segments in ((), arena.segments))
        assert with_ <= without
        assert without - with_ == arena.saved_bytes
        assert list(arena.segments) == sorted(set(arena.segments))
        saved += arena.saved_bytes > 0
    assert saved > 1000


def test_the_large_pool_is_that_of_the_allocator() -> None:
    draw = random.Random(1)
    for _ in range(50):
        loop = list(random_loop(draw, 60))
        large = [(number, size) for number, size in loop if size > MIB]
        chosen = {number for number, _ in large}
        events = [event for event in loop if event[0] in chosen]
        pool = LargePool()
        pool.run(recorded(events).events)
        assert pool.reserved_bytes == reserved([], (), events)


@pytest.mark.parametrize(
    ("most_events", "far", "times"),
    [(MOST_EVENTS, 0.05, 1), (2 * MOST_EVENTS, 0.05, 1), (2 * MOST_EVENTS, 0.0, 2)],
    ids=["quick", "thorough, and little is lost", "thorough"],
)
def test_a_search_ends_after_so_many_events(most_events: int, far: float, times: int) -> None:
    loop = list(random_loop(random.Random(2), 15_000))
    events = recorded(loop).events
    simulated = 0
    plain = LargePool.run

    def counted(pool: LargePool, events: list[Event], most_bytes: float = float("inf")) -> int:
        nonlocal simulated
        count = plain(pool, events, most_bytes)
        simulated += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LargePool, "run", counted)
        patch.setattr("planner.allocator.arena._FAR", far)
        arena = find_arena([], events, most_events)
    assert arena.saved_bytes > 0
    assert 0.9 * times * MOST_EVENTS <= simulated <= times * MOST_EVENTS + len(events)  # what is left: tries


def test_segments_that_cannot_be_smaller_end_the_search() -> None:
    before, live = [(n, 3 * MIB) for n in range(1, 6)], range(6, 10)
    loop = [*((n, 5 * MIB // 2) for n in live), *((n, 0) for n in live)]
    assert find_arena(before, loop).segments == (10 * MIB,)


def test_what_a_recorded_run_frees_may_be_from_before() -> None:
    before = ((0, 50 * MIB, 0), (1, 30 * MIB, 0))
    events = (("free_completed", 0, 50 * MIB, 0), ("alloc", 2, 40 * MIB, 0), ("alloc", 3, 80 * MIB, 0))
    events += (("free_completed", 3, 80 * MIB, 0), ("alloc", 4, 90 * MIB, 0))
    assert arena_of_run(RecordedRun(0, before, events, 0)).segments == (90 * MIB,)


def test_what_is_never_there_at_once_shares_a_segment() -> None:
    loop = [(1, 30 * MIB), (2, 50 * MIB), (1, 0), (2, 0), (3, 90 * MIB), (3, 0)]
    arena = find_arena([], loop)
    assert (arena.segments, arena.saved_bytes) == ((90 * MIB,), 80 * MIB)
    assert most_in_use(loop) == 90 * MIB
    assert find_arena([], []).segments == ()
    assert find_arena([], [(1, 30 * MIB), (1, 0)]).segments == ()  # nothing to save


# ---- the plan ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A step of some tens of MiB, for a GPU without a context."""
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(64, 64 + 8 * (i % 2)), nn.GELU(), nn.Linear(64 + 8 * (i % 2), 64))
            for i in range(4)
        )
    )
    gpu = replace(find_device("V100-32GB"), context_bytes=0, library_bytes=4 * MIB)
    step = Step((torch.randn(60_000, 64),), {}, loss=mean_square)
    return prepare(model, step, PlanOptions(optimizer="AdamW", device=gpu, solver="sqrt_n", time_limit=600))


@pytest.fixture(scope="module")
def plan(prepared: Prepared) -> Plan:
    return Plan.of(plan_prepared(prepared, "70%"))


def test_a_plan_states_its_arena_and_reserves_less_with_it(plan: Plan) -> None:
    whole = plan.whole_step
    assert whole is not None
    assert whole.arena
    assert whole.unarranged_reserved_bytes is not None
    assert whole.reserved_bytes < whole.unarranged_reserved_bytes
    assert "without the arena" in plan.summary()
    assert Plan.loads(plan.dumps()).whole_step == whole


def test_a_budget_in_bytes_is_met_with_the_arena(prepared: Prepared) -> None:
    free = prepared.baseline_whole_step.total_bytes
    plan = plan_prepared(prepared, free * 3 // 4)
    assert plan.whole_step is not None
    assert plan.whole_step.total_bytes <= free * 3 // 4


def test_only_a_stored_plan_is_searched_for_thoroughly(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(before: list[Event], loop: list[Event], most_events: int) -> Any:
        asked.append(most_events)
        return find_arena(before, loop, 50_000)

    monkeypatch.setattr(training_loop, "find_arena", noted)
    plan_prepared(prepared, prepared.baseline_whole_step.total_bytes * 3 // 4)
    assert asked[-1] == THOROUGH_EVENTS
    assert {*asked[:-1]} == {MOST_EVENTS}


def test_the_unplanned_step_reserves_less_with_one(prepared: Prepared) -> None:
    without, with_ = prepared.baseline_whole_step, prepared.reserving_whole_step
    assert without.arena == []
    assert with_.arena
    assert with_.reserved_bytes < without.reserved_bytes == with_.unarranged_reserved_bytes
    loop = prepared.footprint.loop(prepared.problem.eager.allocations)
    again = reservation(replace(loop, arena=arena_of(loop).segments))
    assert again.reserved_bytes == with_.reserved_bytes


def test_on_the_cpu_there_is_none() -> None:
    step = Step((torch.randn(4, 8),), {}, loss=mean_square)
    plan = plan_prepared(prepare(nn.Linear(8, 8), step, PlanOptions(solver="none")), "200%")
    assert plan.whole_step is not None
    assert plan.whole_step.arena == []
    assert plan.whole_step.unarranged_fragmentation_bytes is None


# ---- having it reserved --------------------------------------------------------------------------------


class Block:
    """A tensor of a simulated GPU."""

    def __init__(self, allocator: CachingAllocator, size: int) -> None:
        self._allocator, self._address = allocator, 0
        self._address = allocator.malloc(size)

    def data_ptr(self) -> int:
        return self._address

    def __del__(self) -> None:
        self._allocator.free(self._address)


@dataclass
class SimulatedMemory:
    """What is asked of a GPU, answered by the simulated allocator."""

    memory_bytes: int | None = None
    usable: bool = True
    lists: int = 0
    forgot: int = 0
    trace: list[tuple[str, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(memory_bytes=self.memory_bytes, trace=self.trace)

    def supports_arena(self) -> bool:
        return self.usable

    def frees(self) -> int:
        return sum(action == "segment_free" for action, *_ in self.trace)

    def allocated_bytes(self) -> int:
        return self.allocator.allocated_bytes

    def segments(self) -> Segments:
        self.lists += 1
        return [(s[0].address, sum(block.size for block in s)) for s in self.allocator.segments()]

    def allocate(self, size: int) -> Block:
        try:
            return Block(self.allocator, size)
        except SimulatedOutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def peak_bytes(self) -> int:
        return self.allocator.peak_allocated_bytes

    def reset_peak(self) -> None:
        self.forgot += 1
        self.allocator.peak_allocated_bytes = self.allocator.allocated_bytes


def test_a_loop_with_the_arena_reserves_what_the_plan_predicts(prepared: Prepared) -> None:
    whole = prepared.reserving_whole_step
    loop = prepared.footprint.loop(prepared.problem.eager.allocations)
    memory = SimulatedMemory()
    for size in loop.resident:
        memory.allocator.malloc(size)
    memory.allocator.free(memory.allocator.malloc(50 * MIB))  # of the time before, which is given back
    arena = Arena.of(whole, prepared.resident)
    arena.reserve(memory)
    assert memory.forgot == 1
    for _ in run(replace(loop, resident=()), memory.allocator):
        arena.reserve(memory)
    assert memory.allocator.reserved_bytes == whole.reserved_bytes
    assert memory.lists == 0  # no segment went


def test_segments_that_have_gone_are_reserved_again() -> None:
    memory, arena = SimulatedMemory(), Arena([20 * MIB, 60 * MIB], 0, 0)
    arena.reserve(memory)
    arena.reserve(memory)
    assert memory.allocator.reserved_bytes == 80 * MIB
    memory.allocator.empty_cache()
    assert memory.allocator.reserved_bytes == 0
    arena.reserve(memory)
    arena.reserve(memory)
    assert (memory.allocator.reserved_bytes, memory.lists) == (80 * MIB, 1)
    stays = memory.allocator.malloc(40 * MIB)  # in the larger one, whose rest the smaller one would fit into
    memory.allocator.empty_cache()
    assert memory.allocator.reserved_bytes == 60 * MIB
    arena.reserve(memory)
    assert memory.allocator.reserved_bytes == 80 * MIB
    memory.allocator.free(stays)


def test_segments_that_go_one_after_the_other_keep_their_sizes() -> None:
    memory = SimulatedMemory()
    arena = Arena([20 * MIB, 50 * MIB, 90 * MIB], 0, 0)
    arena.reserve(memory)
    for kept in ([20, 90], [20], [20, 90], [50]):
        held = [memory.allocate(size * MIB) for size in kept]
        memory.empty_cache()
        del held
        arena.reserve(memory)
        assert sorted(size for _, size in memory.segments()) == [20 * MIB, 50 * MIB, 90 * MIB]


def test_a_smaller_segment_at_the_same_address_is_another() -> None:
    memory = SimulatedMemory()
    arena = Arena([60 * MIB], 0, 0)
    arena.reserve(memory)
    ((address, _),) = memory.segments()
    memory.empty_cache()
    memory.segments = lambda: [(address, 20 * MIB)]  # type: ignore[method-assign]
    before = memory.allocator.reserved_bytes
    arena.reserve(memory)
    assert memory.allocator.reserved_bytes == before + 60 * MIB


def test_state_that_is_there_already_needs_no_room() -> None:
    memory, arena = SimulatedMemory(), Arena([20 * MIB, 100 * MIB], 50 * MIB, 30 * MIB)
    for size in (50 * MIB, 30 * MIB):
        memory.allocator.malloc(size)
    arena.reserve(memory)
    assert memory.allocator.reserved_bytes == 80 * MIB + 90 * MIB
    with_a_batch, arena = SimulatedMemory(), Arena([20 * MIB, 100 * MIB], 50 * MIB, 30 * MIB)
    with_a_batch.allocator.malloc(60 * MIB)  # a batch more than planned is no state
    arena.reserve(with_a_batch)
    assert with_a_batch.allocator.reserved_bytes == 60 * MIB + 120 * MIB


def test_a_gpu_without_the_memory_is_warned_of_once() -> None:
    memory, arena = SimulatedMemory(memory_bytes=50 * MIB), Arena([20 * MIB, 60 * MIB], 0, 0)
    with pytest.warns(planner.PlanWarning, match="Free memory of the GPU"):
        arena.reserve(memory)
    arena.reserve(memory)
    assert memory.allocator.allocated_bytes == 0


def test_where_the_settings_have_no_use_for_it_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimulatedMemory(usable=False)
    arena = Arena([20 * MIB], 0, 0)
    arena.reserve(memory)
    arena.reserve(memory)
    assert memory.allocator.peak_reserved_bytes == 0
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for conf, has in {
        "": True,
        "garbage_collection_threshold:0.8": True,
        "expandable_segments:True": False,
        "max_split_size_mb:128": False,
        "backend:cudaMallocAsync": False,
    }.items():
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
        assert CudaMemory(torch.device("cuda", 0)).supports_arena() is has


def test_nothing_is_asked_of_an_allocator_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    for name in ("memory_stats_as_nested_dict", "max_memory_allocated", "memory_snapshot"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    arena = Arena([20 * MIB], 0, 0)
    arena.reserve(CudaMemory(torch.device("cuda", 0)))
    arena.reserve(CudaMemory(torch.device("cuda", 0)))


@pytest.mark.parametrize("backend", ["graph", "replay"])
def test_every_planned_step_looks_after_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[int]] = []
    monkeypatch.setattr(Arena, "before_step", lambda self, _model: looked.append(self.sizes))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8)
    made = planner.plan(model, (x,), budget="min", loss=mean_square, backend=backend)
    assert made.whole_step is not None
    made = Plan.of(
        made.model_copy(update={"whole_step": made.whole_step.model_copy(update={"arena": [MIB]})})
    )

    def trained(model: nn.Module) -> list[list[int]]:
        looked.clear()
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model(x)
        return looked.copy()

    assert trained(made.apply(model)) == [[MIB], [MIB]]
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert trained(again) == [[MIB], [MIB]]
    made.apply(model, arena=False)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert trained(again) == [[], []]


def test_on_the_cpu_nothing_is_asked_of_cuda() -> None:
    Arena([MIB], 0, 0).before_step(nn.Linear(2, 2))


def test_reserving_for_an_unplanned_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(Arena, "before_step", lambda self, _model: looked.append(self.sizes))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 72), nn.GELU(), nn.Linear(72, 64))
    x = torch.randn(60_000, 64, device="meta")
    reserved = planner.reserve(model.to("meta"), (x,), loss=mean_square, device="V100-32GB")
    assert reserved.after.arena
    assert str(reserved).endswith("reserved")
    assert "reserved beforehand" in str(reserved)
    model(x)
    model.eval()(x)
    copy.deepcopy(model).train()(x)
    assert looked == [reserved.after.arena] * 2
    reserved.remove()
    model.train()(x)
    assert len(looked) == 2
    evaluated = planner.reserve(model, (x,), loss=mean_square, device="V100-32GB", training=False)
    model(x)
    assert len(looked) == 2
    model.eval()(x)
    assert len(looked) == 3
    evaluated.remove()
    assert "reserved beforehand" in str(planner.estimate(model, (x,), loss=mean_square, device="V100-32GB"))
    small = planner.reserve(nn.Linear(2, 2), (torch.ones(2, 2),), loss=mean_square)
    assert str(small) == "nothing is reserved beforehand"
