"""Mutations that disable what is promised for what users have inside their modules."""

from benchmarks.mutations.record import Change, Mutation

_COPIED = "    pairs = [] if step.loss is None else _paired(module, step, copied, (args, kwargs))\n"


def _ends_graphs(variable: str, method: str) -> Change:
    """Dynamo ends a graph where it would follow a call of some kind."""
    return Change(
        "planner/_torch/tracing/dynamo_patches.py",
        "    _break_inside_loops()\n",
        "    _break_inside_loops()\n"
        f"    from torch._dynamo.variables.{variable}\n"
        "\n"
        "    def end(*_: Any, **__: Any) -> Any:\n"
        '        unimplemented(gb_type="a call", context="", explanation="It may do anything.", hints=[])\n'
        "\n"
        f'    _replace({variable.split()[-1]}, "{method}", end)\n',
    )


CHECKPOINTS_END_GRAPHS = _ends_graphs(
    "higher_order_ops import CheckpointHigherOrderVariable", "_call_function"
)


def _strips(*kinds: str) -> Change:
    """The copy that is captured has no hooks of some kinds."""
    cleared = "".join(f"        part.{kind}.clear()\n" for kind in kinds)
    return Change(
        "planner/training_step/copies.py", _COPIED, f"    for part in copied.modules():\n{cleared}{_COPIED}"
    )


INSIDE = [
    Mutation(
        "views-handed-on",
        "Gradients of a view that a graph hands on come to its uses one by one, and on in one sum.",
        "The view is taken inside of the graph.",
        (Change("planner/capture/graphs/runners.py", "apart = views_outside(graph)", "apart = None"),),
        (
            "tests/behaviour/memory/test_views_handed_on.py::"
            "test_what_is_used_elsewhere_too_gets_the_gradient_of_a_view_in_one[two_uses_of_the_first_view]",
        ),
    ),
    Mutation(
        "uses-before-views",
        "What uses an input before a view of it is taken gets its gradient in eager's order.",
        "It uses the input.",
        (
            Change(
                "planner/compiled/views_outside.py",
                "if views_to_come[operand] and operand in outside and _differentiable(operand):",
                "if False:",
            ),
        ),
        (
            "tests/behaviour/memory/test_views_handed_on.py::"
            "test_what_is_used_elsewhere_too_gets_the_gradient_of_a_view_in_one[used_before_the_view]",
        ),
    ),
    Mutation(
        "bilinear-under-autocast",
        "A bilinear product under autocast is cast inside of its kernel, as by eager.",
        "It is put into a graph, where autocast is off.",
        (
            Change(
                "planner/_torch/tracing/breaks/calls_left_out.py",
                "if not torch._C._is_any_autocast_enabled():",
                "if True:",
            ),
        ),
        (
            "tests/behaviour/bits/test_round_like_eager.py::"
            "test_a_bilinear_product_under_autocast_is_cast_as_by_eager",
        ),
    ),
    Mutation(
        "functions-differentiated-twice",
        "Gradients of gradients through an autograd function inside of a planned module are an error.",
        "Its backward is taken for a constant.",
        (
            Change(
                "planner/_torch/execution/function_calls.py",
                "if not (again and any(",
                "if True or not (again and any(",
            ),
            Change("planner/hooks/double_backward.py", "if calls_functions(context.graph):", "if False:"),
        ),
        (
            "tests/hooks/test_gradients_inside.py::"
            "test_gradients_that_no_graph_has_whole_are_refused[WithAFunction]",
        ),
    ),
    Mutation(
        "checkpoints-of-the-user",
        "The user's own torch.utils.checkpoint calls are seen through.",
        "A graph ends at each call of torch.utils.checkpoint.",
        (CHECKPOINTS_END_GRAPHS,),
        (
            "tests/behaviour/gradients/test_user_checkpoints.py::"
            "test_checkpoints_of_the_user_are_seen_through[Checkpointed]",
        ),
    ),
    Mutation(
        "gradient-checkpointing-enable",
        "gradient_checkpointing_enable() of Hugging Face's models is seen through.",
        "A graph ends at each call of torch.utils.checkpoint.",
        (CHECKPOINTS_END_GRAPHS,),
        (
            "tests/behaviour/gradients/test_user_checkpoints.py::"
            "test_gradient_checkpointing_of_hugging_face_is_seen_through",
        ),
    ),
    Mutation(
        "checkpoints-are-said",
        "The plan says how many checkpoints of the user's it sees through.",
        "The notes of a plan leave them out.",
        (
            Change(
                "planner/capture/differences.py",
                "    if calls := sum(",
                "    if not sum(",
            ),
        ),
        (
            "tests/behaviour/gradients/test_user_checkpoints.py::"
            "test_checkpoints_of_the_user_are_seen_through[Checkpointed]",
        ),
    ),
    Mutation(
        "forward-hooks",
        "Forward hooks on submodules are planned, and run.",
        "The copy that is captured has no forward hooks.",
        (_strips("_forward_hooks", "_forward_pre_hooks"),),
        ("tests/behaviour/paths/test_inside.py::test_forward_hooks_on_submodules_change_what_is_computed",),
    ),
    Mutation(
        "backward-hooks",
        "Backward hooks on submodules are planned, and run.",
        "The copy that is captured has no backward hooks.",
        (_strips("_backward_hooks", "_backward_pre_hooks"),),
        ("tests/behaviour/paths/test_inside.py::test_backward_hooks_on_submodules_change_gradients",),
    ),
    Mutation(
        "outer-hooks",
        "Hooks on the planned module itself run.",
        "The planned call goes past the module's hooks.",
        (
            Change(
                "planner/runtime/install.py",
                "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
                "        return self._forward(*args, **kwargs)\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_hooks_on_the_outside_run",),
    ),
    Mutation(
        "autograd-function",
        "A torch.autograd.Function of the user's is captured with its own backward.",
        "A graph ends at each function of the user's.",
        (_ends_graphs("misc import AutogradFunctionVariable", "call_apply"),),
        ("tests/_torch/test_operators.py::test_a_custom_autograd_function",),
    ),
    Mutation(
        "autograd-function-breaks",
        "A torch.autograd.Function of the user's that breaks the graph inside is planned around.",
        "Graphs are traced with gradients on, wherever they were captured.",
        (
            Change(
                "planner/capture/graphs/graph_runner.py",
                "with under_autocast(self.autocast), torch.set_grad_enabled(self.grad_enabled), dtype:",
                "with under_autocast(self.autocast), dtype:",
            ),
        ),
        ("tests/_torch/test_operators.py::test_a_custom_autograd_function_that_breaks_the_graph",),
    ),
    Mutation(
        "custom-operators",
        "Operators of torch.library that draw random numbers draw the same when they are run again.",
        "Only PyTorch's own operators are run again from the state of the generator.",
        (
            Change(
                "planner/_torch/operators.py",
                " or (is_foreign(operator) and not is_collective(operator))\n",
                "\n",
            ),
        ),
        ("tests/_torch/test_operators.py::test_an_operator_that_draws_numbers_draws_the_same_again",),
    ),
    Mutation(
        "in-place",
        "Operations in place: what reads a buffer or input that the forward changes is not run again.",
        "What the forward overwrites is not known.",
        (
            Change(
                "planner/graph/joint_graph.py",
                "    mutated = aot_metadata.mutated_inputs(module)\n",
                "    mutated = frozenset[int]()\n",
            ),
        ),
        ("tests/behaviour/paths/test_inside.py::test_a_buffer_that_the_forward_changes",),
    ),
    Mutation(
        "layerdrop",
        "Layers that are left out by Python's random numbers: planning draws none of the user's.",
        "Planning does not put Python's generator back.",
        (
            Change(
                "planner/training_step/generators.py",
                "        random.setstate(self.python)\n",
                "",
            ),
        ),
        ("tests/behaviour/paths/test_inside.py::test_layers_that_are_left_out_by_chance[DroppedByPython]",),
    ),
    Mutation(
        "cache",
        "Planning does not fill caches of the user's module.",
        "The captured copy shares dictionaries and lists with the module, and does not put them back.",
        (
            Change(
                "planner/training_step/python_state.py",
                "CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)\n",
                "CONTAINERS = (OrderedDict, defaultdict, set, deque)\n",
            ),
            Change(
                "planner/module_copies.py",
                "    memo: dict[int, Any] = dict(replaced or {})\n",
                "    memo: dict[int, Any] = dict(replaced or {})\n"
                "    for part in module.modules():\n"
                "        held = [v for n, v in vars(part).items() if not n.startswith('_')]\n"
                "        memo.update({id(v): v for v in held if isinstance(v, dict | list)})\n",
            ),
        ),
        ("tests/behaviour/paths/test_inside.py::test_a_cache_that_the_first_forward_fills",),
    ),
    Mutation(
        "loss-of-the-copy",
        "A loss that reads what the forward leaves in the module reads that of the copy.",
        "It reads what an earlier forward left in the user's module.",
        (
            Change(
                "planner/training_step/copies.py",
                "referring_to(loss, dict(zip(parts_of(module), parts_of(copied), strict=False)))",
                "loss",
            ),
        ),
        (
            "tests/behaviour/modules/test_module_copies.py::"
            "test_a_loss_reads_what_the_forward_of_the_copy_left[a method]",
        ),
    ),
    Mutation(
        "lists-count",
        "Training is captured with what lists of numbers decide, as planning is.",
        "Dynamo ends a graph where a list of several numbers decides a size.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "(*contexts, lists_count, states_apart)",
                "(*contexts, states_apart)",
            ),
        ),
        (
            "tests/behaviour/paths/test_constant_lists.py::"
            "test_a_step_follows_its_plan_where_a_list_decides_sizes[repeated]",
        ),
    ),
    Mutation(
        "unseen-per-use",
        "Graphs that the plan has not seen leave the sums of gradients that they share to the engine.",
        "Each adds up its own uses of a tensor first.",
        (
            Change(
                "planner/runtime/backend.py",
                "                    spec = GraphSpec.per_use(len(example_inputs))\n                return",
                "                return",
            ),
        ),
        (
            "tests/runtime/test_first_forward.py"
            "::test_gradients_that_pieces_of_a_first_forward_share_are_added_up_in_order",
        ),
    ),
    Mutation(
        "set-up-before",
        "What transformers does to a model in its first forward is done before that is traced.",
        "The first step runs in pieces.",
        (Change("planner/_torch/tracing/dynamo_patches.py", "    set_up_before_tracing(_is_ours)\n", ""),),
        (
            "tests/runtime/test_first_forward.py::"
            "test_hooks_that_transformers_puts_into_a_model_in_its_first_forward"
            "_are_there_before_it_is_traced",
        ),
    ),
    Mutation(
        "path-not-planned",
        "A path of the forward that the plan has not seen gives a warning.",
        "The schedule is remapped to such a path without a warning.",
        (
            Change(
                "planner/runtime/backend.py",
                "                warn(message)\n            return remapped.backward, remapped.packed, {}\n",
                "                logger.info(message)\n"
                "            return remapped.backward, remapped.packed, {}\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_a_path_that_was_not_planned_is_right_and_said",),
    ),
    Mutation(
        "breaks-in-loops",
        "Graph breaks inside loops leave graphs that are planned.",
        "Dynamo gives up a function whose loop breaks.",
        (
            Change(
                "planner/_torch/tracing/dynamo_patches.py",
                "    _break_inside_loops()\n    _round_like_eager()",
                "    _round_like_eager()",
            ),
        ),
        ("tests/capture/test_capture_coverage.py::test_breaks_inside_a_loop_leave_graphs_that_are_planned",),
    ),
    Mutation(
        "first-compiled-around-it",
        "A plan runs inside of compiled code also where nothing was captured in the process before.",
        "Dynamo learns of plans when the first step is captured.",
        (
            Change(
                "planner/runtime/installed.py",
                "    end_graphs_at_plans()  #",
                "    pass  #",
            ),
        ),
        ("tests/lazy/test_lazy.py::test_compiled_code_around_it_is_all_that_a_process_has_compiled",),
    ),
    Mutation(
        "known-breaks",
        "A call that breaks in a loop is known by how often the loop called before.",
        "The first call of the loop is taken for the one that breaks.",
        (
            Change(
                "planner/_torch/tracing/breaks/known_breaks.py",
                "(known.code, known.offset, known.called, known.before) == call:",
                "(known.code, known.offset, known.called) == call[:3]:",
            ),
        ),
        ("tests/_torch/test_known_breaks.py::test_plans_are_those_of_finding_it_from_each_frame[_InALoop]",),
    ),
    Mutation(
        "compiled-by-others",
        "The user's own torch.compile works as before, whatever its backend.",
        "What asks whether a capture is ours needs backends that can be hashed.",
        (
            Change(
                "planner/_torch/tracing/dynamo_patches.py",
                "any(backend is innermost for backend in backends)",
                "innermost in backends",
            ),
        ),
        ("tests/behaviour/paths/test_compiled_parts.py::test_code_of_the_users_own_is_compiled_as_before",),
    ),
    Mutation(
        "compiled-parts",
        "Parts that the user compiles run as they were written while a plan is made, and are named.",
        "They are compiled.",
        (
            Change(
                "planner/_torch/tracing/callbacks.py",
                "        return None if _runs_uncompiled(callback) else by_stance(callback)",
                "        return by_stance(callback)",
            ),
        ),
        (
            "tests/behaviour/paths/test_compiled_parts.py::"
            "test_compiled_parts_run_uncompiled_by_a_plan_and_it_says_so"
            "",
        ),
    ),
    Mutation(
        "loops-that-broke",
        "A break in a loop that the user's own torch.compile met does not end our captures there.",
        "Methods that Dynamo left alone are left alone.",
        (
            Change(
                "planner/_torch/dynamo.py",
                "            trace_methods_of(module)",
                "            pass",
            ),
        ),
        (
            "tests/behaviour/paths/test_compiled_parts.py::"
            "test_a_break_in_a_loop_that_the_users_compile_met_is_passed_by_a_plan"
            "[before]",
        ),
    ),
    Mutation(
        "gradient-of-a-view",
        "Under Inductor a result gets its gradient beside the same that is not differentiated.",
        "One tensor is returned for both.",
        (
            Change(
                "planner/lowering/inductor.py",
                'return given if role == "backward" else results_apart(given, results)',
                "return given",
            ),
        ),
        (
            "tests/inductor/test_inductor.py::"
            "test_the_gradient_of_a_result_is_there_beside_the_same_that_is_not_differentiated",
        ),
    ),
]
