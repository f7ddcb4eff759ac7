"""The garbage collector passes over what was there before, and calls have room on the stack."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from planner import heap
from planner.addresses import addresses
from planner.capture.capture import capture
from planner.costs.devices import find_device
from planner.heap import (
    garbage_let_go,
    made_to_stay,
    newer_objects,
    nothing_set_aside,
    older_objects_set_aside,
    room_on_the_stack,
)
from planner.problem.build import build_problem
from planner.training_step.step import Step
from tests.small import small_gpt

pytestmark = pytest.mark.heavy


class Ring:
    """Garbage once nothing else holds it: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of a user's, not in the tests'."""
    monkeypatch.setattr(heap, "_setting_aside", 0)
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_only_what_is_made_meanwhile_is_collected() -> None:
    older = Ring()
    old = weakref.ref(older)
    with older_objects_set_aside():
        del older
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_an_error_and_a_context_inside_leave_nothing_frozen() -> None:
    def fails() -> None:
        with older_objects_set_aside():
            with older_objects_set_aside():
                pass
            assert gc.get_freeze_count()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_freeze_count() == 0


def generation_of(wanted: object) -> int:
    return next(n for n in range(3) if any(o is wanted for o in gc.get_objects(generation=n)))


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_made_to_stay_counts_as_old() -> None:
    with made_to_stay():
        kept = Ring()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert generation_of(kept) == 2
    assert gc.get_freeze_count() == 0
    there = weakref.ref(kept)
    del kept
    gc.collect()
    assert there() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_made_to_stay_leaves_what_others_set_aside() -> None:
    older = Ring()
    with older_objects_set_aside():
        with made_to_stay():
            kept = Ring()
        assert not any(o is older for o in gc.get_objects())  # it lists what is not set aside
        assert generation_of(kept) == 0
    gc.freeze()
    with made_to_stay():
        pass
    assert gc.get_freeze_count()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_froze_on_purpose_stays_frozen() -> None:
    gc.freeze()
    kept = Ring()
    with older_objects_set_aside():
        pass
    assert gc.get_freeze_count()
    gc.freeze()
    there = weakref.ref(kept)
    del kept
    with older_objects_set_aside():
        pass
    gc.collect()
    assert there() is not None  # it is frozen still


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_is_counted_once(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter goes through all of it; while a model is captured, each of its graphs would ask."""
    if frozen:
        gc.freeze()
    asked, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or count())
    with older_objects_set_aside():
        for _ in range(3):
            with garbage_let_go():
                pass
    with garbage_let_go():
        pass
    assert len(asked) == 2
    assert (count() > 0) is frozen


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("around", [False, True], ids=["alone", "inside"])
def test_newer_objects_are_listed(around: bool) -> None:
    older = Ring()
    with older_objects_set_aside() if around else nullcontext(), newer_objects() as newer:
        younger = Ring()
        found = newer()
    assert any(o is younger for o in found)
    assert not any(o is older for o in found)


def test_full_collections_are_seldom_while_capturing() -> None:
    before = gc.get_threshold()
    with newer_objects():
        assert gc.get_threshold()[2] > before[2]
    assert gc.get_threshold() == before


def test_addresses_are_ids_and_hold_nothing() -> None:
    objects: list[object] = [object(), [1, 2], (3,), "four", {}]
    counts = [sys.getrefcount(o) for o in objects]
    assert addresses(objects).tolist() == [id(o) for o in objects]
    assert [sys.getrefcount(o) for o in objects] == counts
    assert addresses([]).tolist() == []


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("inside", [False, True])
def test_garbage_is_let_go_at_the_end(inside: bool) -> None:
    older = Ring()
    old = weakref.ref(older)
    with older_objects_set_aside() if inside else nullcontext():
        with garbage_let_go():
            del older
            new = weakref.ref(Ring())
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_is_let_go_where_users_have_frozen_objects() -> None:
    gc.freeze()
    with garbage_let_go():
        new = weakref.ref(Ring())
    assert new() is None
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


@contextmanager
def _in_another_thread(context: AbstractContextManager[object]) -> Iterator[Callable[[], None]]:
    """Another thread has entered a context; what is returned has it leave."""
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with context:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()

    def left() -> None:
        leave.set()
        thread.join()

    try:
        yield left
    finally:
        left()


@pytest.mark.usefixtures("nothing_frozen")
def test_a_thread_that_ends_its_work_leaves_aside_what_another_needs_aside() -> None:
    """As solving does that ends while another thread captures and looks for what was left behind."""
    older = Ring()
    with _in_another_thread(older_objects_set_aside()) as leave, newer_objects() as newer:
        younger = Ring()
        leave()
        found = newer()
        assert any(o is younger for o in found)
        assert not any(o is older for o in found)
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_all_threads_are_done_with_stays_not_frozen() -> None:
    """The one that looked at all objects meanwhile sets none aside again."""
    with _in_another_thread(older_objects_set_aside()) as leave, nothing_set_aside():
        assert gc.get_freeze_count() == 0
        leave()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_users_froze_and_let_go_again_is_asked_for_anew() -> None:
    gc.freeze()
    with older_objects_set_aside(), garbage_let_go():
        pass
    gc.unfreeze()
    with older_objects_set_aside():
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="its system does not count pages that are asked for")
def test_calls_go_back_and_forth_on_one_piece_of_the_stack() -> None:
    import resource

    def nothing() -> None:
        pass

    def deeper(calls: int) -> None:
        if calls:
            deeper(calls - 1)
        for _ in range(100):
            nothing()

    def pages(run: Callable[[int], None]) -> int:
        run(400)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            run(400)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert pages(room_on_the_stack(deeper)) < 5 * 50
    assert room_on_the_stack(deeper).__name__ == "deeper"
    with pytest.raises(TypeError, match="deeper"):
        room_on_the_stack(deeper)()  # type: ignore[call-arg]


@pytest.mark.usefixtures("nothing_frozen")
def test_the_problem_of_a_step_counts_as_old_when_it_is_built() -> None:
    model, args, kwargs = small_gpt(layers=1)
    captured = capture(model, Step(args, kwargs))
    problem = build_problem(captured, find_device("cpu"), None)
    assert generation_of(problem.graph) == 2
