"""Mutations that disable what planning promises to leave alone: everything of the user's."""

from benchmarks.mutations.record import Change, Mutation

BELONGINGS = [
    Mutation(
        "hooks-of-the-copy",
        "Hooks, and functions in a module's lists and dictionaries, refer to the copy that is planned.",
        "They write to the user's module, and the copy reads its own.",
        (
            Change(
                "planner/module_copies.py",
                "        elif kind in _HOLDS_FUNCTIONS and id(value) in made:\n",
                "        elif False:\n",
            ),
        ),
        (
            "tests/behaviour/modules/test_module_copies.py"
            "::test_hooks_functions_in_containers_and_weak_references_refer_to_the_copy",
        ),
    ),
    Mutation(
        "no-gradient-of-leaves",
        "What a forward writes into a weight has no gradient, and takes no memory for one.",
        "The one that AOTAutograd expects is counted.",
        (
            Change(
                "planner/graph/passes/__init__.py", "    expect_no_gradient_of_leaves,\n    wait", "    wait"
            ),
        ),
        (
            "tests/behaviour/memory/test_overwritten_leaves.py::"
            "test_the_peak_counts_no_gradient_of_what_is_written",
        ),
    ),
    Mutation(
        "saved-tensors-in-a-forward",
        "What a forward does inside of hooks on saved tensors runs as written.",
        "A graph of the same code as an earlier layer saves through the user's hooks.",
        (
            Change(
                "planner/runtime/backend.py",
                "(written() if saved_tensors_are_changed() else call)(*args)",
                "call(*args)",
            ),
            Change(
                "planner/_torch/dynamo.py",
                "        if saved_tensors_are_changed():\n            return left_alone()\n",
                "",
            ),
        ),
        ("tests/behaviour/gradients/test_saved_tensors.py::test_hooks_that_change_what_is_saved",),
    ),
    Mutation(
        "let-go-of-captured",
        "What was captured of code behind a break is let go of with what it was captured for.",
        "Dynamo keeps it as long as the process runs.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "        self._captured.add(result)\n",
                "",
            ),
        ),
        ("tests/_torch/test_let_go.py::test_what_was_compiled_of_code_behind_a_break",),
    ),
    Mutation(
        "gradients-after-planning",
        "Planning leaves the user's gradients alone, whatever a copy of the module still holds on to.",
        "Gradients that arrived are not taken away again.",
        (
            Change(
                "planner/training_step/snapshot.py",
                "                tensor.grad = before.gradient\n",
                "                pass\n",
            ),
        ),
        ("tests/behaviour/modules/test_intact.py::test_modules_from_around_a_function_are_left_alone",),
    ),
    Mutation(
        "data-after-planning",
        "Where the step is captured with data, statistics of modules from around it stay as they were.",
        "What was written to is not put back.",
        (
            Change(
                "planner/training_step/snapshot.py",
                "                    tensor.copy_(before.data)\n",
                "                    pass\n",
            ),
        ),
        ("tests/behaviour/modules/test_intact.py::test_modules_from_around_a_function_are_left_alone",),
    ),
    Mutation(
        "variables-after-planning",
        "Planning leaves no tensors without data in the user's variables.",
        "Only tensors are put back.",
        (
            Change(
                "planner/training_step/snapshot.py",
                "        self.python.restore()\n"
                "        if self.namespaces is not None:\n"
                "            self.namespaces.take_out_tensors()\n",
                "",
            ),
        ),
        (
            "tests/training_step/test_step_snapshot.py::test_a_step_that_changes_all_that_it_can",
            "tests/report/test_verification.py::test_state_that_the_forward_replaces_or_caches_is_put_back",
        ),
    ),
    Mutation(
        "what-a-step-reaches",
        "Planning and verify leave alone what inputs and the loss refer to: objects, generators, gradients.",
        "Only what the module itself holds is noted.",
        (
            Change(
                "planner/training_step/snapshot.py",
                "            (*given, step.loss, *attributes, *reach.objects),\n",
                "            (),\n",
            ),
        ),
        ("tests/training_step/test_step_snapshot.py::test_a_step_that_changes_all_that_it_can",),
    ),
    Mutation(
        "inputs-of-each-pass",
        "Each pass of planning sees the inputs that a step sees, not what the pass before put into them.",
        "They go on as the last pass left them.",
        (
            Change(
                "planner/capture/capture.py",
                "        self._given.restore()\n",
                "",
            ),
        ),
        (
            "tests/training_step/test_step_snapshot.py::"
            "test_each_pass_of_planning_begins_with_what_the_step_has[an input]",
        ),
    ),
    Mutation(
        "inputs-overwritten",
        "Planned with inputs='overwritten', what the user writes into inputs and biases changes no gradient.",
        "Re-runs read the inputs themselves.",
        (
            Change(
                "planner/_torch/tensors.py",
                "        return tensor.to(device, copy=True)\n",
                "        return tensor.to(device)\n",
            ),
        ),
        ("tests/graph/test_overwritten.py::test_what_is_overwritten_is_not_read_again",),
    ),
    Mutation(
        "inputs-changed",
        "A change in place of what only a plan reads again is an error that names the plan and the remedy.",
        "Nobody looks before PyTorch does.",
        (
            Change(
                "planner/runtime/read_again.py",
                "            if version is not None and versions.version_of(tensor) != version:\n",
                "            if False:\n",
            ),
        ),
        ("tests/graph/test_overwritten.py::test_the_error_names_what_changed_the_plan_and_the_remedy",),
    ),
    Mutation(
        "other-memory",
        "A weight that is given other memory before the backward keeps the gradients of the old one.",
        "Re-runs and views read what the weight has by then.",
        (
            Change(
                "planner/graph/overwritten.py",
                "    return tensor.detach()\n",
                "    return tensor\n",
            ),
        ),
        ("tests/graph/test_overwritten.py::test_tensors_that_are_given_other_memory_are_no_change",),
    ),
    Mutation(
        "caches-of-others",
        "What a step without data leaves in caches of other files is replaced by tensors with data.",
        "It stays there.",
        (
            Change(
                "planner/capture/on_a_copy.py",
                "                put_right(left, copied.value_of)\n",
                "                pass\n",
            ),
        ),
        ("tests/training_step/test_left_behind.py::test_caches_of_other_files_hold_tensors_with_data",),
    ),
    Mutation(
        "imports-while-tracing",
        "Files that a forward imports first are run without the modes that trace.",
        "They are run with them.",
        (
            Change(
                "planner/_torch/without_data/imports.py",
                "        with without_modes():\n",
                "        with contextlib.nullcontext():\n",
            ),
        ),
        (
            "tests/training_step/test_left_behind.py::"
            "test_a_file_that_the_forward_imports_first_has_data[after a break]",
        ),
    ),
    Mutation(
        "let-go",
        "What was planned is freed once the user lets go of it.",
        "Dynamo keeps what it compiled with.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "eval_frame.cached_backends.pop(",
                "dict(eval_frame.cached_backends).pop(",
            ),
        ),
        ("tests/_torch/test_let_go.py::test_what_was_compiled_of_code_behind_a_break[_applies]",),
    ),
    Mutation(
        "random-numbers-of-imports",
        "Python's generator is left alone by the first use of the planner in a process.",
        "What an import draws is not given back.",
        (Change("planner/imports.py", "        random.setstate(state)\n", "        pass\n"),),
        (
            "tests/behaviour/bits/test_random_state.py::"
            "test_a_fresh_process_draws_what_it_draws_without_a_plan",
        ),
    ),
    Mutation(
        "exchanged-in-place",
        "Parameters of a planned module can be exchanged in place, between steps too.",
        "What Dynamo remembers of a capture refers to them weakly, which PyTorch refuses to exchange.",
        (
            Change(
                "planner/_torch/dynamo.py",
                '"invalidate_compile_context_weakrefs": True,',
                '"invalidate_compile_context_weakrefs": False,',
            ),
        ),
        (
            "tests/behaviour/memory/test_exchanged_in_place.py::"
            "test_a_module_that_was_planned_at_its_first_call",
        ),
    ),
    Mutation(
        "optimizers-in-hooks-put-back",
        "verify puts back the optimizers that hooks on weights step in the backward.",
        "Their state is that of many steps afterwards.",
        (
            Change(
                "planner/training_step/snapshot.py",
                "(*given, step.loss, *attributes, *reach.objects),",
                "(*given, step.loss, *attributes),",
            ),
        ),
        (
            "tests/behaviour/gradients/test_optimizer_in_backward.py::"
            "test_all_that_a_method_changes_is_put_back",
        ),
    ),
    Mutation(
        "hooks-that-cannot-be-put-back",
        "Hooks after accumulation that change what nobody can put back do not run in verify.",
        "They run, and what they change stays.",
        (
            Change(
                "planner/training_step/arrivals/suspended.py",
                "            hooks.clear()  # the very dictionary that autograd calls\n",
                "            pass\n",
            ),
        ),
        (
            "tests/behaviour/gradients/test_optimizer_in_backward.py"
            "::test_a_hook_of_which_something_cannot_be_put_back_is_not_run_and_said",
        ),
    ),
    Mutation(
        "weights-that-hooks-stepped",
        "verify compares weights with hooks, whose gradients these may have let go of.",
        "A wrong gradient that was used and let go of is not noticed.",
        (
            Change(
                "planner/verification/outcomes.py",
                "        if all_hooks_on(parameter):",
                "        if False:",
            ),
        ),
        (
            "tests/behaviour/gradients/test_optimizer_in_backward.py::"
            "test_verify_sees_weights_that_a_wrong_gradient_stepped",
        ),
    ),
]
