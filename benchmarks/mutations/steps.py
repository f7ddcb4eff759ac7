"""Mutations that disable what every planned step promises: the same numbers, in the predicted memory."""

from benchmarks.mutations.record import Change, Mutation

STEPS = [
    Mutation(
        "fused-as-planned",
        "Inductor fuses in a step what it fused in its prediction.",
        "It fuses in the order of the schedule, whatever was planned.",
        (
            Change(
                "planner/runtime/backend.py",
                "target.backend_options, self._plan.fusion)",
                "target.backend_options)",
            ),
        ),
        ("tests/inductor/test_inductor_fusion.py::test_what_runs_is_fused_as_planned",),
    ),
    Mutation(
        "inductor-fuses-in-place",
        "What Inductor runs takes what the schedule takes.",
        "Inductor fuses what lies far apart, and holds what that reads.",
        (
            Change(
                "planner/_torch/inductor/fusion.py",
                "            if node.is_extern():\n",
                "            if False:\n",
            ),
        ),
        ("tests/inductor/test_inductor.py::test_sums_and_what_runs_again_stay_where_the_schedule_has_them",),
    ),
    Mutation(
        "inductor-kernels-end",
        "What Inductor runs frees what it read where that would raise the peak.",
        "A kernel goes on until the next call of a library, and holds all it read.",
        (
            Change(
                "planner/_torch/inductor/fusion.py",
                "return held > 0 and bool(moments.allocated[coming] + held > moments.peak)",
                "return False",
            ),
        ),
        (
            "tests/inductor/test_inductor_memory.py::test_a_kernel_ends_where_what_it_has_read_would_raise_the_peak",
        ),
    ),
    Mutation(
        "inductor-waits",
        "Memory that is used again is held no longer than costs nothing.",
        "A program holds what it could use again until it does, though that raises its peak.",
        (
            Change(
                "planner/_torch/inductor/memory.py",
                "self.overall_peak_memory = max(self.overall_peak_memory, total)",
                "self.overall_peak_memory = max(self.overall_peak_memory, 2 * total)",
            ),
        ),
        (
            "tests/inductor/test_inductor_reuse.py::test_a_buffer_is_freed_where_the_most_is_held_until_its_next_use",
        ),
    ),
    Mutation(
        "inductor-results-of-operators",
        "What a program holds is known line by line.",
        "What an operator reads is taken for freed before its results are there.",
        (
            Change(
                "planner/_torch/inductor/memory.py",
                ' + sum(map(bytes_of, getattr(node, "outputs", ())))',
                "",
            ),
        ),
        (
            "tests/inductor/test_inductor_reuse.py"
            "::test_what_is_held_by_lines_is_what_the_program_holds[attention-shapes2-earlier]",
        ),
    ),
    Mutation(
        "inductor-saved-as-it-lies",
        "A backward is compiled for what its forward's program returns.",
        "It is compiled for the strides that were traced, and Inductor copies some views.",
        (Change("planner/lowering/inductor.py", "emitted = iter(found)", "emitted = iter(())"),),
        (
            "tests/inductor/test_inductor_memory.py"
            "::test_a_saved_view_that_inductor_copies_is_read_as_it_lies[anywhere]",
        ),
    ),
    Mutation(
        "checks-of-values",
        "A check of values in the forward checks by a plan, too.",
        "It returns nothing that is used, and is dropped.",
        (
            Change(
                "planner/_torch/joint/effects.py",
                "torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)\n",
                "",
            ),
        ),
        ("tests/behaviour/paths/test_checks_of_values.py::test_a_step_ends_with_an_error_as_without_a_plan",),
    ),
    Mutation(
        "unread-draws",
        "Random numbers that the forward draws and does not use are drawn.",
        "AOTAutograd drops them, and what is drawn later draws their numbers.",
        (
            Change(
                "planner/_torch/joint/aot.py",
                "        stack.enter_context(inductor_config.patch(fallback_random=True))\n",
                "",
            ),
        ),
        ("tests/behaviour/memory/test_unread_draws.py::test_what_is_drawn_and_not_used_is_drawn[dropout]",),
    ),
    Mutation(
        "left-losses",
        "Losses that a forward leaves in attributes are differentiated by where no loss is given.",
        "They are not, and training by them is refused.",
        (
            Change(
                "planner/training_step/step.py",
                "            outputs += [t for t in self.module_losses() if id(t) not in known]\n",
                "",
            ),
        ),
        (
            "tests/training_step/test_left_losses.py"
            "::test_losses_left_in_attributes_are_differentiated_by_where_none_is_given[whole-attribute]",
        ),
    ),
    Mutation(
        "losses-of-earlier-forwards",
        "Losses that an earlier forward left are none of a step.",
        "They are differentiated by again, and what they need is freed.",
        (
            Change(
                "planner/training_step/step.py",
                "(*outputs, *(reference() for reference in earlier))",
                "outputs",
            ),
        ),
        ("tests/training_step/test_left_losses.py::test_one_of_an_earlier_forward_is_none_of_the_step",),
    ),
    Mutation(
        "inside-frozen-parts",
        "What is allocated inside of a graph of which nothing is differentiated counts.",
        "It is one operation, and its own peak is missing.",
        (
            Change(
                "planner/capture/graphs/graph_runner.py",
                "self._operation_by_operation if runs_as_it_is else compiled.call",
                "compiled.call",
            ),
        ),
        ("tests/runtime/test_forward_only.py::test_what_they_allocate_inside_counts",),
    ),
    Mutation(
        "inductor-saved-as-traced",
        "What a forward saves lies as Inductor lays it out.",
        "It lies as it was traced: what convolutions return is copied, and statistics are rounded otherwise.",
        (
            Change(
                "planner/lowering/inductor.py",
                "as_traced = None if own is None else own - sum(i < own for i in aliases)",
                "as_traced = None",
            ),
        ),
        (
            "tests/inductor/test_inductor_layouts.py"
            "::test_with_the_same_layouts_buffers_are_those_of_torch_compile[Inductor's]",
        ),
    ),
    Mutation(
        "inductor-unread-inputs",
        "What Inductor's program does not read is not handed to it.",
        "It is, and lives until the program returns.",
        (
            Change(
                "planner/lowering/inductor.py",
                "        if node.users:\n            node.name",
                "        if True:\n            node.name",
            ),
        ),
        ("tests/inductor/test_inductor_memory.py::test_what_is_not_read_is_not_held",),
    ),
    Mutation(
        "inductor-results-in-place",
        "What a product reads, or is read late, is computed where the schedule has it under Inductor.",
        "It is computed where it is read, and what it is made of is held until then.",
        (
            Change(
                "planner/_torch/inductor/order.py",
                "if _goes_to_library(node) or (late and _frees_more(node, until, place, realized)):",
                "if False:",
            ),
        ),
        (
            "tests/inductor/test_inductor_memory.py::test_a_sum_of_gradients_is_held_in_the_place_of_what_is_added",
        ),
    ),
    Mutation(
        "programs-of-executions",
        "A graph that runs several times in a step follows the plan's program of each time.",
        "Every time it follows the program of the first.",
        (
            Change(
                "planner/runtime/executions.py",
                "        number = self._next()\n",
                "        number = self._plan.order[0 * self._next()]\n",
            ),
        ),
        ("tests/runtime/test_executions.py::test_executions_follow_programs_of_their_own",),
    ),
    Mutation(
        "programs-of-others",
        "What Dynamo captures for one layer and runs for others follows the plan of these.",
        "It follows the plan of the one for all.",
        (
            Change(
                "planner/runtime/executions.py",
                "        return order[position]\n",
                "        return order[self._mine[-1]]\n",
            ),
        ),
        (
            "tests/runtime/test_executions.py::test_what_is_captured_for_one_block_follows_the_plan_for_others_too",
        ),
    ),
    Mutation(
        "plan-is-run",
        "A planned module recomputes what its plan says.",
        "The plan is installed, and its steps recompute nothing.",
        (
            Change(
                "planner/runtime/backend.py",
                "        return record.backward, record.packed, record.completed_by(record.forward_length)\n",
                "        return no_recomputation(joint), (), {}\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_the_plan_is_really_run",),
    ),
    Mutation(
        "freed-at-last-use",
        "The measured peak is the predicted one, to the byte.",
        "Generated code holds its results until it returns.",
        (
            Change(
                "planner/lowering/codegen.py",
                "            self._delete(dead, unused_until.get(node, ()))\n",
                "",
            ),
        ),
        ("tests/runtime/test_install.py::test_the_plan_is_really_run",),
    ),
    Mutation(
        "dropout-again",
        "Dropout that is run again draws the same mask.",
        "It is run again from wherever the generator stands.",
        (
            Change(
                "planner/graph/replay/rng.py",
                "        put(state)\n",
                "        del state\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_the_plan_is_really_run[none]",),
    ),
    Mutation(
        "generator-afterwards",
        "After a planned step the random generators stand where they stand without a plan.",
        "The generator is left where a second run of dropout has moved it.",
        (
            Change(
                "planner/graph/replay/rng.py",
                "    finally:\n        put(present)\n",
                "    finally:\n        del present\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_the_plan_is_really_run[none]",),
    ),
    Mutation(
        "batch-norm-again",
        "Batch normalisations are run again too, without their statistics, which are updated once a step.",
        "They are never run again, as they read what the step overwrites.",
        (
            Change(
                "planner/graph/replay/batch_norm.py",
                "    def call_again(self, node: Node) -> ReplayCall:\n",
                "    def not_called(self, node: Node) -> ReplayCall:\n",
            ),
        ),
        ("tests/behaviour/bits/test_training.py::test_batch_norm_statistics_are_updated_once",),
    ),
    Mutation(
        "several-uses-before-views",
        "An operation that uses an input several times before a view of it is taken is warned of.",
        "Nobody looks for them.",
        (Change("planner/capture/external_accumulation.py", "        + _used_several_times(runner)\n", ""),),
        (
            "tests/behaviour/memory/test_views_handed_on.py::"
            "test_an_operation_that_uses_twice_what_it_is_handed_on_a_view_of_is_warned_of",
        ),
    ),
    Mutation(
        "gradients-of-parts",
        "Parts of an input that a graph hands on are not taken for their gradients: what is held counts.",
        "The gradients are traced in the input's memory.",
        (
            Change(
                "planner/_torch/joint/aot.py",
                "                elif _is_strided(tangent) and storage_key(tangent) in occupied:\n",
                "                elif False:\n",
            ),
        ),
        (
            "tests/behaviour/memory/test_views_handed_on.py::test_parts_that_are_handed_on_are_not_taken_for_their_gradients",
        ),
    ),
    Mutation(
        "gradients-that-are-missed",
        "Parameters that have a gradient without a plan and none with it are a warning.",
        "Nothing is said.",
        (
            Change(
                "planner/capture/differences.py",
                "if without_plan and not with_plan]:",
                "if with_plan and not without_plan]:",
            ),
        ),
        (
            "tests/behaviour/gradients/test_autograd_functions.py::"
            "test_gradients_of_zeros_that_a_function_makes_of_none_are_missed_aloud[True]",
        ),
    ),
    Mutation(
        "states-apart",
        "Captures keep states of the generator where they take none of a step's memory.",
        "PyTorch copies them into tensors.",
        (Change("planner/_torch/dynamo.py", "lists_count, states_apart)", "lists_count)"),),
        (
            "tests/behaviour/memory/test_captures_hold_nothing.py::test_a_step_that_captures_takes_no_more_than_later_ones[Broken-8]",
        ),
    ),
    Mutation(
        "first-inputs-let-go",
        "What watches that inputs stay as they are holds none of those that a graph was captured with.",
        "The first batch is held where nothing is differentiated.",
        (
            Change(
                "planner/runtime/read_again.py",
                "        self._plan, self._graph, self._host = plan, graph, host\n",
                "        self._plan, self._graph, self._host = plan, graph, host\n"
                "        self._held = example_inputs\n",
            ),
        ),
        (
            "tests/behaviour/memory/test_captures_hold_nothing.py::test_a_step_that_captures_takes_no_more_than_later_ones[Viewed-24]",
        ),
    ),
    Mutation(
        "found-elements",
        "What selects elements of its input is measured with as many selected as in the step.",
        "All are.",
        (
            Change(
                "planner/costs/made_up/real_arguments.py",
                "        give(call, args, kwargs)\n",
                "",
            ),
        ),
        ("tests/costs/test_found_elements.py::test_what_is_measured_is_what_the_call_takes[rows]",),
    ),
    Mutation(
        "parts-of-tables",
        "The step without a plan is not charged with tensors that its functions refer to.",
        "Their parts count as if the step made the whole.",
        (
            Change(
                "planner/training_step/recorder.py",
                "KEPT_BY_PYTORCH or (unknown and operators.returns_given(func)):",
                "KEPT_BY_PYTORCH:",
            ),
        ),
        ("tests/training_step/test_recorder.py::test_parts_of_what_functions_refer_to_take_nothing",),
    ),
]
