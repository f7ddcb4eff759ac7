"""Measured peaks and times: exact bytes of known allocations."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner._torch.execution.allocator_events import held_on_cuda
from planner.errors import PlannerError
from planner.verification.measure import MeasurementError, MemoryMeasurement, measure_peak, measure_seconds


def block(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def test_peak_and_what_stays_are_exact() -> None:
    kept = []

    def step() -> None:
        first = block(1000)
        second = block(300)
        del first
        kept.append(block(70))
        del second

    assert measure_peak(step, "cpu") == MemoryMeasurement(peak_bytes=1300, final_bytes=70)


def test_the_outputs_are_held_and_then_released() -> None:
    import weakref

    seen: list[weakref.ref[torch.Tensor]] = []

    def step() -> list[torch.Tensor]:
        output = block(500)
        seen.append(weakref.ref(output))
        return [output]

    assert measure_peak(step, torch.device("cpu")) == MemoryMeasurement(500, 500)
    assert seen[0]() is None


@pytest.mark.heavy
def test_a_training_step() -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    x = torch.randn(16, 64)

    def step() -> None:
        layer(x).sum().backward()

    step()
    layer.zero_grad(set_to_none=True)
    measured = measure_peak(step, "cpu")
    assert measured.final_bytes == 64 * 32 * 4
    # The output, the loss, its gradient and the weight's; the output's gradient is expanded from the loss's.
    assert 64 * 32 * 4 + 16 * 32 * 4 <= measured.peak_bytes <= 64 * 32 * 4 + 2 * 16 * 32 * 4 + 64
    layer.zero_grad(set_to_none=True)
    assert measure_peak(step, "cpu") == measured


def test_views_and_in_place_operations_allocate_nothing() -> None:
    x = torch.zeros(100)
    assert measure_peak(lambda: x.view(10, 10).relu_().t(), "cpu") == MemoryMeasurement(0, 0)


def test_kernel_scratch_counts() -> None:
    x = torch.randn(64, 64).to(torch.bfloat16)
    y = torch.randn(64, 64)
    measured = measure_peak(lambda: x + y, "cpu")  # the operand is cast first
    assert measured == MemoryMeasurement(peak_bytes=2 * 64 * 64 * 4, final_bytes=64 * 64 * 4)


def test_freeing_what_was_there_before_does_not_count() -> None:
    before = [block(5000)]

    def step() -> None:
        before.clear()
        block(40)

    assert measure_peak(step, "cpu") == MemoryMeasurement(40, 0)


@pytest.mark.heavy
def test_freeing_at_an_address_seen_in_an_earlier_session_does_not_count() -> None:
    # The allocator's table still holds the earlier block's size for the address, which is then reported.
    held: list[torch.Tensor] = []
    for _ in range(50):
        measure_peak(lambda: held.append(block(100_000)), "cpu")
        address = held[0].data_ptr()
        held.clear()
        others = [block(99_000) for _ in range(20)]
        reused = [tensor for tensor in others if tensor.data_ptr() == address]
        del others
        if reused:
            break
    held += reused
    reused.clear()

    def step() -> torch.Tensor:
        held.clear()
        return block(70)

    assert measure_peak(step, "cpu") == MemoryMeasurement(70, 70)


@pytest.mark.heavy
def test_an_error_in_the_step_passes_through() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(step, "cpu")
    assert measure_peak(lambda: block(9), "cpu").peak_bytes == 9


def test_an_open_profiler_session_is_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(MeasurementError, match=r"torch\.profiler session is open") as caught:
            measure_peak(lambda: None, "cpu")
        assert isinstance(caught.value, PlannerError)


def test_other_devices_are_refused() -> None:
    with pytest.raises(MeasurementError, match="not on 'meta'"):
        measure_peak(lambda: None, "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_cuda() -> None:
    def step() -> torch.Tensor:
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        return torch.empty(100, dtype=torch.uint8, device="cuda")

    assert measure_peak(step, "cuda") == MemoryMeasurement(1 << 20, 512)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_allocator_does_not_split_off_is_counted_apart() -> None:
    torch.cuda.empty_cache()
    size = 11 << 20  # gets a segment of 12 MiB, of which 1 MiB is too little to be split off

    def step() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    assert measure_peak(step, "cuda") == MemoryMeasurement(size, size, 1 << 20)


class FakeAllocator:
    """A caching allocator whose history is this, and which counts a little more at its peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *events: int, enabled: bool = False) -> None:
        self.ran = 0
        trace = [{"action": "alloc" if e > 0 else "free_completed", "size": abs(e)} for e in events]
        trace.insert(1, {"action": "segment_alloc", "size": 5})
        snapshot = {"device_traces": [trace]}
        self.history: list[Any] = []
        fakes: dict[str, Any] = {
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: None,
            "current_device": lambda: 0,
            "memory_allocated": lambda device: 100 + 7000 * self.ran,
            "max_memory_allocated": lambda device: 100 + 9000,
        }
        for name, function in fakes.items():
            monkeypatch.setattr(torch.cuda, name, function)
        memory = torch.cuda.memory
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: enabled, raising=False)
        monkeypatch.setattr(memory, "_record_memory_history", lambda **how: self.history.append(how))
        monkeypatch.setattr(memory, "_snapshot", lambda device: snapshot)

    def step(self) -> None:
        """Counts its runs."""
        self.ran += 1


def test_on_cuda_each_block_counts_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeAllocator(monkeypatch, 600, 3000, -600, 513, -100)
    # 1024 + 3072, of which 1024 go; 1024 come, and 512 go that were there before.
    assert measure_peak(gpu.step, "cuda") == MemoryMeasurement(4096, 3584, 9000 - 4096)
    assert gpu.ran == 1
    assert gpu.history[-1] == {"enabled": None}


def test_scratch_on_cuda_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the block of a workspace of an odd size counts as allocated, and is not asked for."""
    gpu = FakeAllocator(monkeypatch, 1024, 12_058_640, -12_058_640)
    assert held_on_cuda(gpu.step, torch.device("cuda"), 512) == (1024 + 12_059_136, 1024)


def test_scratch_while_a_history_is_recorded_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeAllocator(monkeypatch, 600, enabled=True)
    assert held_on_cuda(gpu.step, torch.device("cuda"), 512) == (9000, 7000)
    assert gpu.ran == 1


def test_a_history_that_is_being_recorded_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeAllocator(monkeypatch, 600, enabled=True)
    assert measure_peak(gpu.step, "cuda") == MemoryMeasurement(9000, 7000)
    assert (gpu.ran, gpu.history) == (1, [])


def spin(seconds: float) -> Callable[[], None]:
    def step() -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    return step


def test_times_are_medians_of_each_step() -> None:
    short, long = measure_seconds([spin(0.002), spin(0.02)], repeats=3)
    assert 0.002 <= short < long
    assert long >= 0.02


def test_steps_are_interleaved_after_one_run_each() -> None:
    order: list[str] = []
    measure_seconds([lambda: order.append("a"), lambda: order.append("b")], repeats=2)
    assert "".join(order) == "ab" + "abab"


def test_sleeping_is_not_process_time() -> None:
    (seconds,) = measure_seconds([lambda: time.sleep(0.05)], repeats=1)
    assert seconds < 0.04
