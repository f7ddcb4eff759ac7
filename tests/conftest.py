"""What holds for all tests."""

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

# No test asserts a time: on a busy machine any example may take long.
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all that they start.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest listens to loggers that do not propagate. To this one PyTorch writes each graph out as text, several
# times, where anyone listens.
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
    """Of what a file of tests has captured nothing stays, and the garbage collector passes over what does.

    A process that runs hundreds of tests has millions of objects otherwise, and each measurement of memory,
    which collects garbage first, would go through all of them.
    """
    with older_objects_set_aside():
        yield
        if "torch" in sys.modules:
            sys.modules["torch"].compiler.reset()
        gc.collect()
    if next(_FILES) % 10 == 0:  # what became garbage of older files
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _seconds_that_repeat(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans are made by the roofline where no costs are named, or they would differ from run to run.

    Files marked `timed` have the seconds that users have by default, and so have commands, examples and
    notebooks, which run in processes of their own.
    """
    from planner.planning import cost_source

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("timed") is None:
            patch.setattr(cost_source, "MOST_TIMED_SECONDS", -1.0)
        yield


@pytest.fixture(autouse=True)
def _graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `graphs` are of plans that are followed by graphs, whatever the step."""
    from planner.planning import prepare

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("graphs") is not None:
            patch.setattr(prepare, "_can_replay", lambda _model, _options: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _short_searches() -> Iterator[None]:
    """The search part by part takes seconds a plan and has a file of its own; elsewhere it is short."""
    from solvers.effort import EFFORTS

    with pytest.MonkeyPatch.context() as patch:
        fast = EFFORTS["fast"]
        patch.setitem(EFFORTS, "fast", replace(fast, parts_work=min(fast.parts_work, 2_000)))
        yield


@pytest.fixture(scope="module")
def no_hurry() -> Iterator[None]:
    """A second of the solvers is ten of the machine's: what they return depends on what they try, and not on
    what else the machine does. Limits of no time stay limits of no time."""
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
    """One process that is all there are."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be compiled runs as it was traced for Inductor, without a compiler."""
    from planner._torch.inductor import compiling

    def boxed(module: Any, *_: Any, **__: Any) -> tuple[Any, str, list[Any]]:
        def run(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()
            return module(*taken)

        return run, "", []

    monkeypatch.setattr(compiling, "compiled", boxed)
