"""Mutations of plans that are followed by replaying."""

from benchmarks.mutations.record import Change, Mutation

_FOLLOW = "planner/replay/follow.py"
_TESTS = "tests/test_replayed.py"

REPLAYS = [
    Mutation(
        "the-very-storage",
        "A tensor is the plan's value only if it lies in the storage that the noted call made.",
        "Another tensor at that place is dropped, and made again as something else.",
        (Change(_FOLLOW, "ref() is tensor.untyped_storage() and ", ""),),
        (f"{_TESTS}::test_a_layer_that_is_frozen_or_reads_another_value_is_noticed",),
    ),
    Mutation(
        "versions-of-what-is-read-again",
        "What is read again in the backward is as it was in the forward.",
        "Gradients are of weights that were changed meanwhile.",
        (Change(_FOLLOW, "and self.owner._version != self.version\n", "and False\n"),),
        (f"{_TESTS}::test_what_is_changed_in_place_after_the_forward_is_an_error",),
    ),
    Mutation(
        "kept-where-the-graph-is-kept",
        "A backward that is to run again lets go of nothing.",
        "The second one finds nothing to make its tensors of.",
        (
            Change(_FOLLOW, "        keep = graph_is_kept()\n", "        keep = False\n"),
            Change(_FOLLOW, "        if graph_is_kept():\n            return\n", ""),
        ),
        (f"{_TESTS}::test_a_backward_may_run_twice_and_be_differentiated",),
    ),
    Mutation(
        "forward-under-a-mode",
        "Gradients that a replayed forward adds up are tensors of their own, as they are under its mode.",
        "The plan takes them for sums in place, and its calls for those of another path.",
        (
            Change(
                "planner/replay/recorder.py",
                "        self._in_forward = self.under_a_mode = True\n",
                "        self._in_forward = True\n",
            ),
        ),
        (
            "tests/test_force_fields.py::"
            "test_force_fields_that_are_no_graph_are_planned_by_replays[LikeMaceWithStress]",
        ),
    ),
]
