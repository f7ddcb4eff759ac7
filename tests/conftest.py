"""Settings and fixtures for all tests."""

import gc
import itertools
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from planner._torch.compat import graphs_are_off
from planner.heap import older_objects_set_aside
from tests.browser import CHROMIUM
from tests.clocks import NO_HURRY, SlowClock
from tests.searches import plan_by_the_roofline, shorten_searches

# No test asserts a time: on a busy machine any example may take long.
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")

# Tests that a shell starts in the background ignore Ctrl-C, and so would the processes that they start.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest adds handlers to loggers that do not propagate. If this one has a handler, PyTorch writes each graph
# to it as text, several times.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

# Trainers are installed beside the other packages, without their dependencies, see the Makefile.
sys.path.append(str(Path(sys.prefix) / "trainers"))


def pytest_report_header() -> list[str]:
    said = []
    if CHROMIUM is None:
        said.append("no Chromium: tests marked `browser` are LEFT OUT (Debian: apt-get install chromium)")
    if (off := graphs_are_off()) is not None:
        said.append(f"{off}: all tests but those marked `any_torch` are LEFT OUT")
    return said


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if graphs_are_off() is not None:
        others = [item for item in items if item.get_closest_marker("any_torch") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if CHROMIUM is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


_FILES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _a_small_heap() -> Iterator[None]:
    """Drop the captures of each file of tests, and set older objects aside from the garbage collector.

    A process that runs hundreds of tests has millions of objects otherwise. Each measurement of memory
    collects garbage first and would go through all of them.
    """
    with older_objects_set_aside():
        yield
        if "torch" in sys.modules:
            sys.modules["torch"].compiler.reset()
        gc.collect()
    if next(_FILES) % 10 == 0:  # the garbage of older files
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _seconds_that_repeat(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan by the roofline where a test names no costs: measured seconds would differ from run to run.

    Files marked `timed` use measured seconds, as users do by default. So do commands, examples and notebooks,
    which run in processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("timed") is None:
            plan_by_the_roofline(patch)
        yield


@pytest.fixture(autouse=True)
def _graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have tests marked `graphs` follow their plans by graphs, never by replays."""
    from planner.planning import prepare

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("graphs") is not None:
            patch.setattr(prepare, "_can_replay", lambda _model, _options: False)
        yield


SEARCHED_WHOLE = {"solvers", "problem", "planning", "planfile", "batch", "test_benchmarks", "test_same_plans"}
"""Folders and files of tests of what searches find."""
SEARCHED_NEAR = {"test_offload", "test_published"}
"""Files of tests for which a schedule has to be near the best."""


@pytest.fixture(autouse=True, scope="module")
def _short_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shorten searches that take seconds a plan: part by part, and for segments to reserve beforehand.

    Files of their own test these.
    """
    from planner.allocator import training_loop
    from planner.allocator.arena import find_arena
    from solvers.effort import EFFORTS

    with pytest.MonkeyPatch.context() as patch:
        fast = EFFORTS["fast"]
        patch.setitem(EFFORTS, "fast", replace(fast, parts_work=min(fast.parts_work, 2_000)))
        if SEARCHED_WHOLE.isdisjoint((request.path.parent.name, request.path.stem)):
            shorten_searches(patch, near=request.path.stem in SEARCHED_NEAR)
        patch.setattr(
            training_loop, "find_arena", lambda before, loop, _most: find_arena(before, loop, 50_000)
        )
        yield


@pytest.fixture(scope="module")
def no_hurry() -> Iterator[None]:
    """Give solvers ten seconds of the machine for each second of their limits.

    So their results depend on the work they do, not on the machine's load. A limit of zero stays zero.
    """
    from solvers import least, milp, portfolio
    from solvers.model import incumbent
    from solvers.programs import lower_bound

    solve, clock = milp.Program.solve, SlowClock()

    def patient(program: Any, **options: Any) -> Any:
        limit = options.pop("time_limit", None)
        return solve(program, time_limit=None if limit is None else limit * NO_HURRY, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (portfolio, incumbent, lower_bound):
            patch.setattr(module, "time", clock)
        patch.setattr(least, "perf_counter", clock.perf_counter)
        patch.setattr(milp.Program, "solve", patient)
        yield


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run graphs as they were traced for Inductor, without a compiler."""
    from planner._torch.inductor import compiling

    def boxed(module: Any, *_: Any, **__: Any) -> tuple[Any, str, list[Any]]:
        def run(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()
            return module(*taken)

        return run, "", []

    monkeypatch.setattr(compiling, "compiled", boxed)
