"""The calls of one planned module."""

import threading

from planner.compiled.calls import Calls


def test_calls_of_other_threads_are_no_part_of_this_one() -> None:
    calls = Calls(lambda text: None)
    calls.begin()
    mine = calls.last

    def other() -> None:
        calls.begin()
        assert calls.next_execution("a graph") == 0
        assert calls.last is not mine

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert calls.last is mine
    assert calls.next_execution("a graph") == 0
