"""Mutations that disable what makes a planned step eager's to the bit, whatever happens in and around it."""

from benchmarks.mutations.record import Change, Mutation

EXACTNESS = [
    Mutation(
        "strides-of-results",
        "A graph's result has the strides of eager in dimensions of one element.",
        "AOTAutograd computes them anew, as it does without plans.",
        (
            Change(
                "planner/_torch/joint/strides_of_results.py",
                "            if alone.stride() != view.stride():\n",
                "            if False:\n",
            ),
        ),
        ("tests/_torch/test_strides_of_results.py::test_results_have_the_strides_of_eager[transposed]",),
    ),
    Mutation(
        "later-hooks",
        "A hook that is registered after the first planned step runs.",
        "Dynamo does not guard hooks, as is its default.",
        (
            Change(
                "planner/_torch/dynamo.py",
                '"skip_nnmodule_hook_guards": False,',
                '"skip_nnmodule_hook_guards": True,',
            ),
        ),
        (
            "tests/behaviour/gradients/test_later_hooks.py::test_a_hook_that_comes_between_steps_and_goes_again[_forward]",
        ),
    ),
    Mutation(
        "backwards-under-autocast",
        "A planned backward inside a region of autocast that would cast there gives a warning.",
        "Nobody says so.",
        (
            Change(
                "planner/hooks/backward_under_autocast.py",
                "        if self._casts[regions]:\n",
                "        if False:\n",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_autocast.py::test_a_backward_under_autocast_warns_where_that_would_cast",
        ),
    ),
    Mutation(
        "switches-of-kernels",
        "A step under other switches of kernels than the first runs as it is, with a warning.",
        "Switches that Dynamo has no guards on are not looked at.",
        (
            Change(
                "planner/_torch/tracing/definitions.py",
                "        self._switches = [(name, read, read()) for name, read in _TRACE_SWITCHES.items()]\n",
                "        self._switches = []\n",
            ),
        ),
        ("tests/hooks/test_switched_kernels.py::test_a_step_under_other_switches_runs_as_it_is",),
    ),
    Mutation(
        "switches-in-the-backward",
        "Switches of kernels that change between a forward and its backward give a warning.",
        "Nobody compares them.",
        (
            Change(
                "planner/hooks/switched_kernels.py",
                "        if self._recomputes and not self._warned:\n",
                "        if False:\n",
            ),
        ),
        ("tests/hooks/test_switched_kernels.py::test_other_switches_in_the_backward_are_said",),
    ),
    Mutation(
        "later-hooks-on-all-modules",
        "Hooks on all modules at once that come later run.",
        "Nobody looks whether there are others than at the first step.",
        (Change("planner/runtime/install.py", "        if hooks != self._hooks:\n", "        if False:\n"),),
        (
            "tests/behaviour/gradients/test_later_hooks.py::test_a_hook_that_comes_between_steps_and_goes_again[_on_all]",
        ),
    ),
    Mutation(
        "casts-that-are-not-kept",
        "Under autocast that keeps no casts a weight that is used twice is cast twice.",
        "Casts are shared whether or not autocast keeps them.",
        (
            Change(
                "planner/graph/passes/autocast_cast_cache.py",
                "        elif depth and keeps[-1] and not transforms:\n",
                "        elif depth and not transforms:\n",
            ),
        ),
        ("tests/graph/test_autocast_cast_cache.py::test_autocast_that_keeps_no_casts",),
    ),
    Mutation(
        "evaluation-in-the-same-region",
        "A call in evaluation mode in the region of autocast of a planned one gives a warning.",
        "Only planned calls are noted.",
        (
            Change(
                "planner/runtime/install.py",
                "        if not self._warned_of_casts:\n",
                "        if False:\n",
            ),
        ),
        (
            "tests/graph/test_autocast_cast_cache.py::test_a_call_in_evaluation_mode_in_the_same_region_is_warned_of",
        ),
    ),
    Mutation(
        "wrappers-around-functions",
        "A wrapper that stands in the place of one of PyTorch's functions is run once.",
        "Graphs call functions by name, and find the wrapper that was followed into them.",
        (Change("planner/runtime/backend.py", "        call_what_was_captured(graph)\n", ""),),
        ("tests/_torch/test_patches.py::test_wrappers_that_are_there_before_planning",),
    ),
    Mutation(
        "wrappers-that-dynamo-takes-for-pytorch",
        "A wrapper that is there before Dynamo looks for PyTorch's functions is run once.",
        "Dynamo takes the wrapper for PyTorch's function.",
        (Change("planner/_torch/tracing/rules.py", "    look_inside_wrappers(rules)\n", ""),),
        ("tests/_torch/test_patches.py::test_wrappers_that_are_there_before_anything_is_compiled",),
    ),
    Mutation(
        "rules-that-pytorch-forgets",
        "A wrapper is run once also where a process group was made after the planning.",
        "Dynamo's rules are changed once in a process; with a process group PyTorch makes them anew.",
        (
            Change(
                "planner/_torch/tracing/rules.py",
                "    if _changed and _changed[0] is rules:\n",
                "    if _changed:\n",
            ),
        ),
        ("tests/_torch/test_patches.py::test_wrappers_are_followed_after_a_process_group_was_made",),
    ),
    Mutation(
        "stances-of-torch-compile",
        "A plan is followed whatever torch.compiler.set_stance says.",
        "Plans are left out without a word where the user switches torch.compile off.",
        (
            Change(
                "planner/_torch/tracing/callbacks.py",
                "        if isinstance(callback, Callback):\n",
                "        if callback is None:\n",
            ),
        ),
        ("tests/behaviour/paths/test_switches.py::test_a_plan_is_followed_in_any_stance",),
    ),
    Mutation(
        "dispatch-modes",
        "A step under a dispatch mode, which runs without its plan, says so.",
        "Nobody asks whether one is on.",
        (
            Change(
                "planner/runtime/plan_call.py",
                "        if (hindrance := hindering_mode()) is None:\n",
                "        if (hindrance := None) is None:\n",
            ),
        ),
        ("tests/behaviour/paths/test_switches.py::test_a_step_under_a_dispatch_mode_says_so",),
    ),
    Mutation(
        "patches-of-classes",
        "A method that is exchanged in a class after the first planned step counts.",
        "Nobody looks at classes after the first step.",
        (
            Change(
                "planner/runtime/install.py",
                "        elif (changed := self._definitions.changed()) is not None:\n",
                "        elif (changed := None) is not None:\n",
            ),
        ),
        ("tests/_torch/test_patches.py::test_patches_after_the_first_step_count",),
    ),
    Mutation(
        "occurrences",
        "Layers of the same code have their own plans though one has no backward.",
        "Graphs without a backward are not counted.",
        (
            Change(
                "planner/runtime/backend.py",
                "        occurrences = matching[0].occurrences\n",
                "        occurrences = 0\n",
            ),
        ),
        (
            "tests/graph/test_per_use_gradients.py::test_layers_of_the_same_code_have_their_own_plans_though_one_has_no_backward",
        ),
    ),
    Mutation(
        "writes-through-masks",
        "Learned values that are written through a mask are planned around, and the peak is as predicted.",
        "Only indices that are numbers end a graph.",
        (
            Change(
                "planner/_torch/tracing/breaks/calls_left_out.py",
                "    _leave_out_writes_through_masks(is_ours)\n",
                "",
            ),
        ),
        ("tests/behaviour/paths/test_numpy.py::test_a_token_that_is_written_through_a_mask",),
    ),
    Mutation(
        "data-decide",
        "What cannot be traced when it runs, since data decide sizes, gives a warning.",
        "Dynamo goes on without the plan, silently.",
        (
            Change(
                "planner/runtime/backend.py",
                "            except aot.DATA_DECIDE as error:",
                "            except ZeroDivisionError as error:",
            ),
        ),
        ("tests/behaviour/paths/test_numpy.py::test_what_cannot_be_traced_when_it_runs_is_warned_of",),
    ),
    Mutation(
        "verified-as-planned",
        "verify measures the step whose random numbers planning saw.",
        "It measures the step after that.",
        (
            Change(
                "planner/verification/compared_steps.py",
                "back too: a path that they decide is then the planned one.\n        self._inputs.restore()",
                "back too: a path that they decide is then the planned one.",
            ),
        ),
        ("tests/behaviour/memory/test_predictions.py::test_predicted_is_measured[Drawn]",),
    ),
    Mutation(
        "shapes-changed-in-place",
        "Changes of shape in place (`squeeze_`, `transpose_`) write nothing, and are traced as they are.",
        "They are taken for writes.",
        (
            Change(
                "planner/_torch/joint/in_place.py",
                "    if torch.Tag.inplace_view in func.tags:\n",
                "    if False:\n",
            ),
        ),
        ("tests/graph/test_in_place.py::test_writes_into_a_stretch_of_a_result",),
    ),
    Mutation(
        "masks-before-pooling",
        "Gradients are masked before max-pooling's backward only where what was pooled is ReLU's result.",
        "Every mask that comes after is taken for ReLU's.",
        (
            Change("planner/graph/passes/max_pooling.py", "        or mask.args[2] != 0\n", ""),
            Change(
                "planner/graph/passes/max_pooling.py",
                "        or undetached(mask.args[1]) is not undetached(pooled)\n"
                "        or undetached(pooled).target is not aten.relu.default"
                "  # whose results are zero, above, or NaN\n",
                "",
            ),
        ),
        ("tests/graph/test_max_pooling.py::test_other_masks_stay_after_pooling",),
    ),
    Mutation(
        "what-was-pooled",
        "Of what was pooled, backward keeps nothing but the sizes.",
        "It is kept.",
        (
            Change(
                "planner/graph/passes/max_pooling.py",
                '    if memory_format(pooled.meta["val"]) is not memory_format(indices):\n',
                "    if True:\n",
            ),
        ),
        ("tests/graph/test_max_pooling.py::test_nothing_that_is_pooled_is_kept[rows]",),
    ),
    Mutation(
        "not-a-number-after-relu",
        "What is not a number after ReLU lets gradients pass where only signs are kept, as in eager.",
        "It is taken for zero.",
        (
            Change(
                "planner/_torch/execution/sign_operators.py",
                "        np.not_equal(part, 0, out",
                "        np.greater(part, 0, out",
            ),
        ),
        ("tests/graph/test_signs.py::test_relu_by_its_signs",),
    ),
    Mutation(
        "results-kept-by-their-signs",
        "What a ReLU returned is predicted to be let go where its signs are kept.",
        "It is predicted to be kept.",
        (
            Change(
                "planner/problem/encodings.py",
                "    read = unpacked[packing.row] if if_unpacked else bits[packing.row]\n",
                "    read = unpacked[packing.row]\n",
            ),
        ),
        ("tests/graph/test_signs.py::test_bits_and_bytes_are_as_promised",),
    ),
    Mutation(
        "forms",
        "The gradient of what was padded has the memory format of what was padded.",
        "Its elements lie row by row.",
        (
            Change(
                "planner/_torch/execution/form_operators.py",
                'memory_format(torch.empty_strided(sizes, form.stride(), device="meta"))',
                "torch.contiguous_format",
            ),
        ),
        ("tests/graph/test_forms.py::test_forms_are_enough",),
    ),
    Mutation(
        "hooks-on-saved-tensors",
        "Hooks on saved tensors see what the step saves without a plan.",
        "They see what the plan saves.",
        (
            Change(
                "planner/_torch/tracing/hindrances.py",
                "    if saved_tensors_are_changed():\n",
                "    if False:\n",
            ),
        ),
        (
            "tests/behaviour/gradients/test_around_a_step.py::test_the_step_runs_as_it_is_and_that_is_said"
            "[_rounded-saved_tensors_hooks are on-False]",
        ),
    ),
    Mutation(
        "default-type-of-the-forward",
        "A planned backward makes tensors again with the default type that the forward had.",
        "It makes them with the default type that is there when it runs.",
        (
            Change(
                "planner/hooks/default_dtype.py",
                "return DefaultDtype() if again else GraphHook()",
                "return GraphHook()",
            ),
        ),
        (
            "tests/behaviour/bits/test_process_settings.py::test_a_default_type_that_is_over_before_the_backward",
        ),
    ),
    Mutation(
        "calls-left-to-replays",
        "What fails for some data, as a matrix without an inverse, and inference mode are no part of graphs.",
        "They are: errors are raised past the code that handles them.",
        (
            Change(
                "planner/_torch/tracing/breaks/calls_left_out.py",
                "if _REFUSED.fullmatch(name) and",
                "if False and",
            ),
        ),
        (
            "tests/behaviour/paths/test_handled_errors.py::test_a_graph_of_it_is_refused[by_function-linalg_solve]",
        ),
    ),
    Mutation(
        "settings-inside-a-forward",
        "A call inside a forward that sets how PyTorch computes ends a graph.",
        "Dynamo follows it, and what is computed behind it is not as it sets.",
        (
            Change(
                "planner/_torch/tracing/breaks/calls_left_out.py",
                "    _leave_out_settings(is_ours)\n",
                "",
            ),
        ),
        ("tests/behaviour/bits/test_process_settings.py::test_what_a_forward_sets[Deterministic]",),
    ),
]
