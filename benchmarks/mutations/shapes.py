"""Mutations that disable what is promised for inputs of other shapes than planned."""

from benchmarks.mutations.record import Change, Mutation

SHAPES = [
    Mutation(
        "known-zeros",
        "Zeros that PyTorch knows to be zeros take no memory.",
        "They are counted.",
        (
            Change(
                "planner/_torch/without_data/plain.py",
                "return 0 if known or",
                "return 0 if",
            ),
        ),
        ("tests/lowering/test_few_bytes.py::test_zeros_that_are_known_to_be_zeros_take_nothing",),
    ),
    Mutation(
        "on-meta",
        "What is on the meta device takes no memory.",
        "It takes what it takes where it is measured.",
        (Change("planner/costs/eager_timeline.py", "not any(sizes) and on_meta(call)", "False"),),
        ("tests/lowering/test_few_bytes.py::test_what_is_on_the_meta_device_takes_nothing",),
    ),
    Mutation(
        "ends-of-loops",
        "What a loop does between regions is captured in later steps, too, if nothing follows the last.",
        "Dynamo gives up what goes on after a region once nothing was left to do there.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "empty = whole or frame.f_code in self._with_graphs or dynamo.config.allow_empty_graphs",
                "empty = whole or dynamo.config.allow_empty_graphs",
            ),
        ),
        ("tests/training_step/test_regions.py::test_regions_of_other_sizes_in_loops_follow_the_plan",),
    ),
    Mutation(
        "sizes-of-regions",
        "Regions of one class and of other sizes are captured as they were planned.",
        "From the second size on they are captured at symbolic sizes.",
        (
            Change(
                "planner/runtime/first_forward.py",
                "return not self.captured_again or self._many_alike or self.is_the_plans",
                "return True",
            ),
        ),
        ("tests/training_step/test_regions.py::test_regions_of_other_sizes_in_loops_follow_the_plan",),
    ),
    Mutation(
        "smaller-batch",
        "A smaller last batch trains by the same plan, with the same gradients.",
        "Generated code holds sizes as the numbers that they were captured with, not as symbols.",
        (
            Change(
                "planner/lowering/codegen.py",
                "        if isinstance(value, Node):\n            return self.names[value]\n",
                "        if isinstance(value, Node):\n"
                '            size = value.meta.get("val")\n'
                "            if isinstance(size, torch.SymInt):\n"
                "                return str(concrete_size(size))\n"
                "            return self.names[value]\n",
            ),
        ),
        (
            "tests/runtime/test_install.py::test_another_batch_size_runs_the_same_plan",
            "tests/behaviour/modules/test_shapes.py::test_batches_and_image_sizes_vary_too",
        ),
    ),
    Mutation(
        "few-captures",
        "Lengths that vary cause a few captures, not one for each length.",
        "Sizes that are found to vary do not become symbols.",
        (
            Change(
                "planner/_torch/dynamo.py",
                '"automatic_dynamic_shapes": symbolic,',
                '"automatic_dynamic_shapes": False,',
            ),
        ),
        ("tests/behaviour/modules/test_shapes.py::test_a_hundred_lengths_are_a_few_captures[_bert]",),
    ),
    Mutation(
        "larger-shape-warns",
        "A shape that is larger than planned gives a warning.",
        "Only plans that may be made again warn of larger shapes.",
        (
            Change(
                "planner/runtime/shapes/policy.py",
                'if self._policy == "reapply" and peak_bytes > planned_bytes:',
                'if self._policy == "replan" and peak_bytes > planned_bytes:',
            ),
        ),
        ("tests/behaviour/modules/test_shapes.py::test_a_peak_is_announced_where_the_loss_is_outside",),
    ),
    Mutation(
        "larger-shape-peak",
        "The warning of a larger shape holds the peak that the plan will have at it.",
        "The peak is predicted for the step that recomputes nothing.",
        (
            Change(
                "planner/runtime/shapes/schedule_at.py",
                "    return replace(prepared, problem=problem), schedule\n",
                "    return replace(prepared, problem=problem), problem.graph.base_schedule\n",
            ),
        ),
        ("tests/behaviour/modules/test_shapes.py::test_a_larger_shape_is_announced_with_its_peak",),
    ),
    Mutation(
        "replan",
        'on_new_shape="replan" keeps the budget at larger shapes, or says that nothing does.',
        "A plan is only made again where there is no budget in bytes.",
        (
            Change(
                "planner/runtime/shapes/policy.py",
                "            if fits:\n",
                "            if peak_bytes <= enough or budget is not None:\n",
            ),
        ),
        ("tests/behaviour/modules/test_shapes.py::test_replan_keeps_the_budget_or_says_that_it_cannot",),
    ),
    Mutation(
        "error-on-new-shape",
        'on_new_shape="error" refuses every other shape before anything is computed.',
        "Only another number of inputs is refused.",
        (
            Change(
                "planner/runtime/shapes/policy.py",
                'if self._policy == "error" and shapes != self._planned:',
                'if self._policy == "error" and shapes.keys() != self._planned.keys():',
            ),
        ),
        ("tests/behaviour/modules/test_shapes.py::test_error_refuses_before_anything_is_computed",),
    ),
    Mutation(
        "remembered-strides",
        "A call on tensors without data is remembered by the strides of its operands.",
        "One on a transposed tensor is taken for one on a plain one.",
        (
            Change(
                "planner/_torch/without_data/plain.py",
                "        tensor.stride(),\n",
                "",
            ),
        ),
        (
            "tests/_torch/test_remembered_calls.py::test_other_operands_are_not_taken_for_remembered_ones[strides]",
        ),
    ),
    Mutation(
        "views-beside",
        "A graph that hands on views, and computes beside them what the loss does not use, follows the plan.",
        "It is traced as if the loss used all of it.",
        (
            Change(
                "planner/runtime/remap.py",
                "for views in plan.views if",
                "for views in plan.views[:0] if",
            ),
        ),
        ("tests/behaviour/memory/test_views_beside.py::test_the_step_follows_its_plan",),
    ),
    Mutation(
        "unseen-path",
        "A path of the forward that the plan has not seen is planned for, before the next step.",
        "What the step with it was called with is not kept.",
        (
            Change(
                "planner/runtime/plan_call.py",
                'if self.on_new_shape == "replan" and self._shapes.strayed:',
                "if False:",
            ),
        ),
        (
            "tests/behaviour/paths/test_other_paths.py::test_a_path_that_takes_more_is_planned_within_the_budget",
        ),
    ),
    Mutation(
        "unseen-path-at-most",
        "Such a path is planned at the largest sizes that the plan is for.",
        "It is looked at with the sizes with which it came.",
        (
            Change(
                "planner/runtime/shapes/policy.py",
                "if largest != shapes and covers(largest, shapes):",
                "if False:",
            ),
        ),
        ("tests/behaviour/paths/test_other_paths.py::test_it_is_planned_at_the_largest_sizes",),
    ),
    Mutation(
        "inputs-require-gradients-as-given",
        "Planning gives the forward inputs as each step does, before it makes them require gradients.",
        "They require gradients from the second pass on, and the forward takes another path in training.",
        (
            Change(
                "planner/training_step/copies.py",
                "if tensor.requires_grad is not requires_grad and (tensor.is_leaf or not is_view(tensor)):",
                "if False:",
            ),
        ),
        (
            "tests/behaviour/gradients/test_force_fields.py::test_forces_of_positions_that_a_helper_prepares_are_not_zero",
        ),
    ),
    Mutation(
        "other-inputs-that-require-gradients",
        "Where other inputs require gradients than planned, a step that cannot be planned so runs unplanned.",
        "It runs through the plan's graphs, and gradients are added up in another order.",
        (Change("planner/runtime/shapes/policy.py", "if self._refused[requiring]:", "if False:"),),
        (
            "tests/behaviour/gradients/test_force_fields.py::test_inputs_that_required_gradients_when_the_plan_was_made",
        ),
    ),
    Mutation(
        "second-backward-of-a-part",
        "A forward is refused that differentiates a part of itself before the loss does.",
        "Its plan is an error of the plan file's.",
        (Change("planner/capture/uncaptured.py", "if again := sorted(", "if False and sorted("),),
        (
            "tests/behaviour/gradients/test_force_fields.py"
            "::test_gradients_that_lead_through_several_graphs_are_those_of_eager[OnlyOnce]",
        ),
    ),
    Mutation(
        "parameters-grown",
        "Parameters that have become larger are planned for.",
        "The step goes on by the plan for smaller ones, over the budget.",
        (
            Change(
                "planner/lazy/changed_parameters.py", "taken if taken > self.planned_bytes else None", "None"
            ),
        ),
        ("tests/behaviour/modules/test_grown.py::test_larger_parameters_are_planned_again[_longer]",),
    ),
    Mutation(
        "step-in-a-backward",
        "A step that is recorded inside of a running backward has a forward.",
        "All of it is part of that backward, and no plan fits its budget.",
        (
            Change(
                "planner/_torch/autograd.py",
                "running in (-1, _around.backward)",
                "running == -1",
            ),
        ),
        (
            "tests/behaviour/gradients/test_inside_a_backward.py::test_the_plan_is_that_made_outside[in_a_hook]",
        ),
    ),
    Mutation(
        "plain-numbers",
        "What cannot be traced with symbols is traced with plain numbers.",
        "The step runs without its plan.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "            if not dynamo.config.automatic_dynamic_shapes:\n                raise\n",
                "            raise\n",
            ),
        ),
        ("tests/behaviour/paths/test_switches_by_number.py::test_a_number_that_changes_switches[gradients]",),
    ),
    Mutation(
        "least-as-written",
        "The least is never above the step without a plan: it runs as written where that takes least.",
        "Schedules are all there is.",
        (
            Change(
                "planner/planning/solve.py",
                "    if not _may_run_as_written(prepared):\n",
                "    if True:\n",
            ),
        ),
        ("tests/behaviour/paths/test_as_written.py::test_a_step_that_is_least_as_written_runs_so[min]",),
    ),
]
