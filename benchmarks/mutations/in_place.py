"""Mutations that disable what keeps sums of gradients, and writes in place, as eager has them."""

from benchmarks.mutations.record import Change, Mutation

IN_PLACE = [
    Mutation(
        "what-runs-together",
        "What runs again as one step of the schedule holds what it has read until its end, as is predicted.",
        "It is freed after the first operation, and the peak is less.",
        (
            Change(
                "planner/lowering/partition.py",
                "            node.meta[RUN_TOGETHER] = emitted.meta[RUN_TOGETHER] = self._steps\n",
                "",
            ),
        ),
        ("tests/lowering/test_few_bytes.py::test_what_is_read_stays_until_all_that_runs_together_is_done",),
    ),
    Mutation(
        "unread-results-of-what-runs-together",
        "Results that nobody reads stay until the step of the schedule that made them ends, as is predicted.",
        "They are freed at once.",
        (
            Change(
                "planner/lowering/codegen.py",
                "unused_until[ends.get(node, node)] = unused",
                "unused_until[node] = unused",
            ),
        ),
        (
            "tests/lowering/test_few_bytes.py::test_results_that_nobody_reads_stay_until_all_that_runs_together_is_done",
        ),
    ),
    Mutation(
        "sums-in-place",
        "Gradients of a single image lie in memory as the engine's sums in place leave them.",
        "Sums are new tensors.",
        (
            Change(
                "planner/graph/passes/in_place_accumulation.py",
                "                node.meta[IN_PLACE] = True\n",
                "                pass\n",
            ),
        ),
        ("tests/_torch/test_operators.py::test_gradients_of_a_single_image_lie_in_memory_as_without_a_plan",),
    ),
    Mutation(
        "numbers-of-written-views",
        "Python numbers that autograd saves where a view is written are counted.",
        "They are not.",
        (
            Change(
                "planner/_torch/execution/saved_numbers.py",
                "elif torch.is_grad_enabled() and (out.is_floating_point() or out.is_complex()):",
                "elif False:",
            ),
        ),
        ("tests/behaviour/memory/test_predictions.py::test_predicted_is_measured",),
    ),
    Mutation(
        "gradients-that-are-parts",
        "Gradients that are parts of larger tensors are taken with the strides that they have.",
        "They are taken as dense ones, in the order of their dimensions.",
        (
            Change(
                "planner/_torch/joint/memory_layout.py",
                "return found if found.fits(sizes) else cls(order)",
                "return cls(order)",
            ),
        ),
        ("tests/graph/test_tangent_layouts.py::test_gradients_of_what_is_joined_are_taken_as_they_are",),
    ),
    Mutation(
        "strides-at-other-sizes",
        "Where gradients have strides of their own, a graph is compiled for each shape.",
        "It is compiled for symbolic sizes, at which they are copied.",
        (
            Change(
                "planner/runtime/backend.py",
                "if not any(g.gradient_layouts for g in self._plan.graphs if g.structure == structure):\n",
                "if True:\n",
            ),
        ),
        ("tests/graph/test_tangent_layouts.py::test_gradients_at_other_sizes_are_taken_as_they_are",),
    ),
    Mutation(
        "pooled-results-that-leave",
        "A pooled result that leaves the graph, and may be changed in place, is not read by the backward.",
        "ReLU's backward reads it.",
        (
            Change(
                "planner/graph/passes/max_pooling.py",
                "if result is None or _is_handed_out(joint, result):",
                "if result is None:",
            ),
        ),
        ("tests/graph/test_max_pooling.py::test_pooled_results_that_a_loop_changes_in_place_are_not_read",),
    ),
    Mutation(
        "running-statistics-in-evaluation",
        "The backward of a batch normalisation in evaluation is given the running statistics it was done by.",
        "It is given the mean in the variance's place.",
        (
            Change(
                "planner/graph/passes/running_statistics.py",
                "        if node.args[_TRAIN] is True and ",
                "        if node.args[_TRAIN] is False:\n"
                "            node.update_arg(_RUNNING[1], node.args[_RUNNING[0]])\n"
                "        elif ",
            ),
        ),
        ("tests/graph/test_running_statistics.py::test_steps_are_equal_and_hold_none",),
    ),
    Mutation(
        "running-statistics-held",
        "The new running statistics of a graph are not held until its backward.",
        "They are.",
        (
            Change(
                "planner/graph/passes/running_statistics.py",
                "                node.update_arg(position, None)",
                "                assert position",
            ),
        ),
        (
            "tests/graph/test_running_statistics.py::test_a_plan_by_regions_takes_what_the_step_without_one_takes",
        ),
    ),
    Mutation(
        "results-changed",
        "A result that the plan keeps and that is changed in place is an error.",
        "Nobody looks: through views gradients are wrong.",
        (
            Change(
                "planner/runtime/read_again.py",
                "if node is not None and self._results:",
                "if False:",
            ),
        ),
        (
            "tests/behaviour/memory/test_kept_results.py::test_a_loop_that_changes_a_kept_result_in_place_is_an_error",
        ),
    ),
    Mutation(
        "results-kept",
        "A result that the step changes in place before its backward is made again.",
        "A plan may keep it.",
        (
            Change(
                "planner/problem/selection.py",
                "    again += _overwritten(graph, kept)\n",
                "",
            ),
        ),
        ("tests/behaviour/memory/test_kept_results.py::test_results_that_are_changed_in_place_are_not_kept",),
    ),
    Mutation(
        "views-handed-out",
        "Gradients that a planned backward made leave it as tensors that are no views.",
        "They leave as they are made.",
        (
            Change(
                "planner/lowering/lowerings.py",
                'gradients = role == "backward"',
                "gradients = False",
            ),
        ),
        ("tests/lowering/test_gradients_handed_out.py::test_what_is_added_to_it_takes_what_was_predicted",),
    ),
    Mutation(
        "strides-of-added-views",
        "Gradients of images that are views in eager leave as views, to which nothing is added in place.",
        "They leave as others do.",
        (
            Change(
                "planner/graph/passes/in_place_accumulation.py",
                "                node.meta[VIEW] = True\n",
                "                pass\n",
            ),
        ),
        (
            "tests/lowering/test_gradients_handed_out.py::test_a_view_stays_one_where_later_strides_depend_on_it",
        ),
    ),
    Mutation(
        "uses-of-transposed-inputs",
        "Gradients of an input that lies transposed are handed out by use where others are added before.",
        "A copy of such an input counts as written to, since it was made by a write.",
        (Change("planner/_torch/joint/aot.py", "    if version_of(copy):\n", "    if False:\n"),),
        (
            "tests/graph/test_per_use_gradients.py::test_uses_of_what_lies_transposed_add_up_as_without_a_plan",
        ),
    ),
    Mutation(
        "strides-of-returned-parts",
        "The gradient of a returned part is planned with the strides that it has.",
        "Its graph is probed with a dense copy in place of the part.",
        (
            Change(
                "planner/capture/graphs/copies_apart.py",
                "    if cloned.stride() == tensor.stride():\n",
                "    if True:\n",
            ),
        ),
        ("tests/graph/test_per_use_gradients.py::test_gradients_of_parts_lie_in_memory_as_without_a_plan",),
    ),
    Mutation(
        "held-for-a-second-run",
        "What a part of the forward made is freed as soon as nobody needs it.",
        "The graph behind it holds it, in case its gradients are differentiated.",
        (
            Change(
                "planner/hooks/double_backward.py",
                "        self._held = _referred_to if after_others else _as_they_are\n",
                "        self._held = _as_they_are\n",
            ),
        ),
        ("tests/behaviour/memory/test_predictions.py::test_what_comes_first_is_not_held_for_a_second_run",),
    ),
    Mutation(
        "sums-into-views",
        "Gradients are not added in place to a view of another.",
        "They are.",
        (
            Change(
                "planner/graph/passes/in_place_accumulation.py",
                "            if made and _without_views(first) is maker[key] and last[key] is node:\n",
                "            if made and last[key] is node:\n",
            ),
        ),
        (
            "tests/_torch/test_operators.py::test_gradients_of_a_single_image_lie_in_memory_as_without_a_plan",
            "tests/graph/test_dying_operands.py::test_nothing_is_added_in_place_to_a_view_nor_written_into_one_whose_strides_are_not_known",
        ),
    ),
    Mutation(
        "strides-of-operands",
        "A result has the strides of a new tensor, whatever those of an operand that it is written into.",
        "Strides of dimensions of one element are taken as traced.",
        (
            Change(
                "planner/graph/dying_operands.py",
                "        if has_one(value) and not self._known_strides.issuperset("
                "(node, *node.all_input_nodes)):\n",
                "        if False:\n",
            ),
        ),
        (
            "tests/graph/test_dying_operands.py::"
            "test_nothing_is_written_into_what_may_have_other_strides_than_traced",
        ),
    ),
    Mutation(
        "dying-operands-that-are-read",
        "Only what nobody reads afterwards is written into.",
        "An operand is written into though something else reads it later.",
        (
            Change(
                "planner/graph/dying_operands.py",
                "        if readers[-1] is not node or self._first[key] in others:\n",
                "        if self._first[key] in others:\n",
            ),
        ),
        ("tests/graph/test_dying_operands.py::test_only_what_dies_is_written_into",),
    ),
    Mutation(
        "residuals-that-wait",
        "A residual is added in place only where that takes no more memory when it is computed again.",
        "It is, whatever the operand is computed of.",
        (
            Change(
                "planner/graph/dying_operands.py",
                "        waits = self._waits_for_free(first)\n",
                "        waits = True\n",
            ),
        ),
        (
            "tests/graph/test_dying_operands.py::"
            "test_in_the_forward_a_residual_is_added_into_what_waits_for_it_at_no_cost",
        ),
    ),
    Mutation(
        "readers-of-divided-means",
        "Gradients of means are divided before they are repeated only where products read them.",
        "Sums read them, too, of which a result in memory of its own is taken.",
        (
            Change(
                "planner/graph/passes/means_and_squares.py",
                "        if product.target not in (aten.mul.Tensor, aten.mul.Scalar) or product.kwargs:\n"
                "            return False\n",
                "",
            ),
        ),
        ("tests/graph/test_means_and_squares.py::test_only_where_products_read_them",),
    ),
    Mutation(
        "dying-operands-of-absent-gradients",
        "What is left of a sum without one of its gradients is not written into.",
        "It is, though it may be a gradient that is read again.",
        (
            Change(
                "planner/hooks/undefined_gradients.py",
                "        forget(node)  # the operand that it writes its result into may be read again\n",
                "        pass\n",
            ),
        ),
        ("tests/graph/test_dying_operands.py::test_without_a_gradient_nothing_is_written_into_what_is_left",),
    ),
    Mutation(
        "writes-in-place",
        "What is written in place into a stretch of something larger lies in memory as without a plan.",
        "Results of such writes are tensors of their own.",
        (Change("planner/_torch/joint/aot.py", "        stack.enter_context(results_in_place())\n", ""),),
        ("tests/graph/test_in_place.py::test_recurrent_cells[GRUCell-20]",),
    ),
    Mutation(
        "gradients-that-arrive-later",
        "A graph whose output turns out to get a gradient is traced again with it.",
        "It stays as it was traced first.",
        (
            Change(
                "planner/capture/graphs/graph_runner.py",
                "        return self._compiled is not None and self._traced_without != self.unused_outputs\n",
                "        return False\n",
            ),
        ),
        (
            "tests/hooks/test_unused_outputs.py::test_a_gradient_that_the_probing_pass_overlooked_is_found_when_the_step_runs",
        ),
    ),
    Mutation(
        "numbers-added-to-integers",
        "A forward may add numbers in place to a part of an integer tensor.",
        "It is taken for one that is differentiated.",
        (
            Change(
                "planner/_torch/execution/saved_numbers.py",
                "        elif torch.is_grad_enabled() and (out.is_floating_point() or out.is_complex()):\n",
                "        elif torch.is_grad_enabled():\n",
            ),
        ),
        ("tests/graph/test_in_place.py::test_a_number_that_is_added_to_some_integers_is_saved_by_nobody",),
    ),
    Mutation(
        "buffers-that-checkpoints-fill",
        "A checkpoint that writes to what it is given runs as written, be the change counted or not.",
        "Only changes that are counted are looked for.",
        (
            Change(
                "planner/_torch/tracing/breaks/break_patches.py",
                "self.changes = any(storage_key(t) in self._given for t in written)",
                "self.changes = any(storage_key(t) in self._given and t._version for t in written)",
            ),
        ),
        ("tests/behaviour/memory/test_recycled_buffers.py::test_a_buffer_that_each_layer_fills_again[data]",),
    ),
    Mutation(
        "bytes-before-and-after",
        "What numpy writes to after a graph has read it is read again as it was, or refused.",
        "Nobody looks at bytes.",
        (
            Change(
                "planner/training_step/unseen_writes.py",
                "        return known and now != before\n",
                "        return False\n",
            ),
        ),
        (
            "tests/behaviour/memory/test_recycled_buffers.py::test_a_buffer_that_numpy_fills_again_is_read_as_it_was",
        ),
    ),
    Mutation(
        "bytes-in-replays",
        "Replays do not run again what read memory that numpy has written to since.",
        "They do.",
        (
            Change(
                "planner/replay/recorder.py",
                "            self.saved.outside_unseen[self._lies_in.get(key, key)] = now\n",
                "            pass\n",
            ),
        ),
        (
            "tests/behaviour/memory/test_recycled_buffers.py::test_a_buffer_that_numpy_fills_again_is_not_read_again_by_replays",
        ),
    ),
    Mutation(
        "results-written-over",
        "A result that `.data` writes over is refused in graphs.",
        "The backward makes it again as it was.",
        (
            Change(
                "planner/hooks/written_in_place.py",
                "            counts = lambda i: self._positions[i] in self._counted",
                "            counts = lambda i: True",
            ),
        ),
        (
            "tests/behaviour/memory/test_recycled_buffers.py::"
            "test_a_result_that_is_written_over_is_refused_in_graphs_and_not_run_again_in_replays[data]",
        ),
    ),
    Mutation(
        "views-without-data",
        "A buffer in a list that `.data` fills behind a break is read again as it was.",
        "The write is noted of a tensor without data that nobody reads.",
        (
            Change(
                "planner/training_step/recorder.py",
                "        return self._lies_in.get(key, key)\n",
                "        return key\n",
            ),
        ),
        (
            "tests/behaviour/memory/test_recycled_buffers.py::"
            "test_a_buffer_in_a_list_that_is_filled_behind_a_break_is_read_as_it_was",
        ),
    ),
    Mutation(
        "memory-lent",
        "Memory that a graph writes to and reads by two tensors, unknown to PyTorch, is refused.",
        "The graph reads what was there before.",
        (
            Change(
                "planner/training_step/unseen_writes.py",
                "        if start < end and number != last[0]:\n",
                "        if False:\n",
            ),
        ),
        ("tests/behaviour/memory/test_recycled_buffers.py::test_what_is_filled_through_dlpack",),
    ),
]
