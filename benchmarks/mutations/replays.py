"""Mutations of plans that are followed by replaying."""

from benchmarks.mutations.record import Change, Mutation

_FOLLOW = "planner/replay/follow.py"
_SLOTS, _BACKWARD = "planner/replay/slots.py", "planner/replay/backward.py"
_NOTED = "planner/replay/noted.py"
_TESTS = "tests/replay/test_replayed.py"
_ONCE = "tests/replay/test_recorded_once.py::test_what_autograd_saves_tells_the_step_without_a_plan"
_OVER = "tests/replay/test_written_over.py"
_PATHS = "tests/replay/test_replayed_paths.py"

REPLAYS = [
    Mutation(
        "the-very-storage",
        "A tensor is the plan's value only if it lies in the storage that the noted call made.",
        "Another tensor at that place is dropped, and made again as something else.",
        (Change(_SLOTS, "ref() is tensor.untyped_storage() and ", ""),),
        (f"{_TESTS}::test_a_layer_that_is_frozen_or_reads_another_value_is_noticed",),
    ),
    Mutation(
        "versions-of-what-is-read-again",
        "What is read again in the backward is as it was in the forward.",
        "Gradients are of weights that were changed meanwhile.",
        (Change(_NOTED, "and self.owner._version != self.version\n", "and False\n"),),
        (f"{_TESTS}::test_what_is_changed_in_place_after_the_forward_is_an_error",),
    ),
    Mutation(
        "settings-of-what-runs-again",
        "What runs again runs as PyTorch was set when it ran first.",
        "It runs as PyTorch is set in the backward.",
        (Change(_BACKWARD, "        if recipe.settings == self._settings_now:\n", "        if True:\n"),),
        (f"{_TESTS}::test_what_runs_again_runs_as_pytorch_was_set",),
    ),
    Mutation(
        "running-statistics-read-again",
        "What reads running statistics before they are updated does not run again behind that.",
        "Only writes that schemas tell of are looked for.",
        (
            Change(
                "planner/replay/repeatable.py",
                "            for key in (*call.outside_written, *call.statistics):\n",
                "            for key in call.outside_written:\n",
            ),
        ),
        (f"{_TESTS}::test_running_statistics_are_read_as_they_were_before_they_were_updated",),
    ),
    Mutation(
        "counted-by-the-tensor-that-is-written",
        "A kept value that is written over is held by the tensor that counts the write.",
        "It is held by the tensor that its call returned.",
        (Change(_SLOTS, "or (writes and slot in self.kept)", "or False"),),
        (f"{_TESTS}::test_a_product_that_is_written_over_is_read_again_as_it_was_left",),
    ),
    Mutation(
        "other-memory-since-it-was-read",
        "What the forward gave other memory after it read it is not read again.",
        "Nobody looks where tensors lie when the forward has ended.",
        (
            Change(
                "planner/replay/recorder.py",
                "            self._look_for_changes()\n",
                "",
            ),
        ),
        ("tests/behaviour/bits/test_swaps.py::test_what_was_read_in_other_memory_is_not_read_again",),
    ),
    Mutation(
        "kept-where-the-graph-is-kept",
        "A backward that is to run again lets go of nothing.",
        "The second one finds nothing to make its tensors of.",
        (
            Change(_BACKWARD, "        keep = graph_is_kept()\n", "        keep = False\n"),
            Change(_BACKWARD, "        if graph_is_kept():\n            return\n", ""),
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
            "tests/behaviour/gradients/test_force_fields.py::"
            "test_force_fields_that_are_no_graph_are_planned_by_replays[LikeMaceWithStress]",
        ),
    ),
    Mutation(
        "sizes-that-data-set",
        "What autograd saves is compared with what was planned, and more is told of.",
        "A step whose sizes data set takes more than predicted without a word.",
        (Change(_FOLLOW, "        if self.larger is not None:\n", "        if False:\n"),),
        (f"{_PATHS}::test_sizes_that_data_set_are_told_of",),
    ),
    Mutation(
        "calls-beside-the-plan",
        "What calls make that the plan has not seen is told of where it does not fit.",
        "It is not counted.",
        (Change(_FOLLOW, "        self.unplanned.call_made(", "        (lambda *_: None)("),),
        (f"{_PATHS}::test_calls_that_the_plan_has_not_seen_are_told_of_where_they_do_not_fit",),
    ),
    Mutation(
        "calls-that-cannot-run-again",
        "A file by which something runs again that lacks what it reads is refused.",
        "It is taken, and the step makes what is lacking as well as it can.",
        (Change("planner/replay/program.py", "        _check(program)\n", ""),),
        (f"{_TESTS}::test_a_file_by_which_a_re_run_lacks_what_it_reads_is_refused",),
    ),
    Mutation(
        "made-before-it-is-written-over",
        "What a call reads that is written over later is made for it alone where it runs again.",
        "The call holds the tensor, and finds it written over.",
        (Change(_SLOTS, "for maker, made in call.before if maker in self.recipes", "for _, made in ()"),),
        (f"{_TESTS}::test_copies_of_what_is_written_over_are_made_again_in_any_order",),
    ),
    Mutation(
        "nothing-that-is-held-is-written-over",
        "The backward writes a result over what was saved only where nothing else holds that.",
        "A user's tensor has a gradient in it.",
        (Change(_BACKWARD, " and is_held_alone(tensor, beside=1)", ""),),
        (f"{_OVER}::test_what_something_holds_is_not_written_over",),
    ),
    Mutation(
        "nothing-is-written-over-twice",
        "Where operators of the backward may run twice, nothing is written over.",
        "The second run reads what the first one wrote.",
        (Change(_BACKWARD, "        once = operators_run_once()\n", "        once = True\n"),),
        (f"{_OVER}::test_a_backward_may_run_otherwise_than_planned",),
    ),
    Mutation(
        "kept-on-another-path",
        "On another path what no noted call makes is not let go of.",
        "A backward asks for it again, and there is nothing to make it of.",
        (
            Change(
                _BACKWARD,
                "            if self.followed or not (slot in bits or slot in held.kept) or "
                "held.can_be_made(slot):\n",
                "            if True:\n",
            ),
        ),
        ("tests/replay/test_backward.py::test_on_another_path_what_no_noted_call_makes_stays",),
    ),
    Mutation(
        "schedule-on-another-path",
        "A step on another path follows the schedule as far as it can.",
        "All is made again at once, in more memory than without a plan.",
        (Change(_BACKWARD, "        self._in_order = True  # the", "        self._in_order = False  # the"),),
        (f"{_PATHS}::test_on_another_path_the_plan_goes_on_behind_it",),
    ),
    Mutation(
        "lengths-of-a-ctc-loss",
        "A CTC loss is recorded as it runs under a dispatch mode.",
        "It is recorded as without, and each step is warned of.",
        (Change("planner/replay/recorder.py", ", lengths_are_tensors():\n", ":\n"),),
        (f"{_TESTS}::test_ctc_losses_are_followed_as_they_are_under_a_dispatch_mode",),
    ),
    Mutation(
        "first-step-like-the-others",
        "A step that changes an attribute is recorded a second time.",
        "What only the first step does is planned.",
        (Change("planner/capture/capture.py", " and (python is None or not python.changed()):", ":"),),
        (f"{_ONCE}[Counting-shape1-2]",),
    ),
    Mutation(
        "otherwise-without-a-mode",
        "Where PyTorch chooses otherwise under a dispatch mode, the step without a plan is recorded, too.",
        "A sum that PyTorch makes in place counts as memory of the step without a plan.",
        (
            Change(
                "planner/training_step/recorder.py",
                "        return None if self.runs_otherwise else self.recording\n",
                "        return self.recording\n",
            ),
        ),
        (f"{_ONCE}[Turned-shape2-2]",),
    ),
    Mutation(
        "casts-inside",
        "An operator that autocast has no rule for casts what it calls, as in eager.",
        "It runs as under any dispatch mode, without autocast.",
        (Change(_FOLLOW, "if func in noted_operators and is_noted(func):", "if False:"),),
        ("tests/replay/test_cast_inside.py::test_what_they_call_is_cast_as_without_a_plan",),
    ),
]
