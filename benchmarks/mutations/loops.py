"""Mutations that disable what is promised for training loops: autocast, accumulation, losses, derivatives."""

from benchmarks.mutations.record import Change, Mutation

DROPS_GRADIENTS = Change(
    "planner/runtime/install.py",
    "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
    "        model.zero_grad()\n"
    "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
)
DETACHES_INPUTS = Change(
    "planner/runtime/install.py",
    "        if program is run_forward:\n",
    "        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)\n"
    "        if program is run_forward:\n",
)
WRITES_GRADIENTS_ITSELF = Change(
    "planner/runtime/backend.py",
    "        return CompiledGraph(compiled.call, hooks), followed\n",
    "        def direct(*args: Any) -> Any:\n"
    "            given = list(args)\n"
    "            for i, tensor in enumerate(args):\n"
    "                if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:\n"
    "                    given[i] = tensor.detach().requires_grad_()\n"
    "                    given[i].register_hook(lambda found, p=tensor: _add(p, found))\n"
    "            return compiled.call(*given)\n"
    "\n"
    "        def _add(parameter: Any, found: Any) -> None:\n"
    "            parameter.grad = found if parameter.grad is None else parameter.grad + found\n"
    "\n"
    "        return CompiledGraph(direct, hooks), followed\n",
)
ABSENT_IS_ZERO = Change(
    "planner/hooks/undefined_gradients.py",
    "absent or None",
    "absent if absent == frozenset(self._tangents.values()) else None",
)

LOOPS = [
    Mutation(
        "calls-that-are-left",
        "After a gradient that is differentiated again, calls of that kind run without the plan.",
        "They go on by the plan, and differ in their last bits at every step.",
        (Change("planner/compiled/calls.py", "self._left.add(call.of_leaves)", "pass"),),
        (
            "tests/behaviour/gradients/test_second_derivatives.py"
            "::test_after_a_second_derivative_calls_of_its_kind_run_as_they_are_and_are_exact[output]",
        ),
    ),
    Mutation(
        "carried-history",
        "What a module keeps of a forward, and goes on from, is set back before each pass of planning.",
        "A pass differentiates what the one before has, which is an error.",
        (
            Change(
                "planner/capture/capture.py",
                "        if CARRIED_HISTORY in self.notes:\n            self._python.put_back_history()\n",
                "",
            ),
        ),
        ("tests/capture/test_carried_history.py::test_neurons_that_are_set_back_between_steps_are_planned",),
    ),
    Mutation(
        "carried-history-verified",
        "verify sets it back before each step that it times, too.",
        "The second one differentiates what the first has.",
        (
            Change(
                "planner/verification/compared_steps.py",
                "            if self._carries_history:\n",
                "            if False:\n",
            ),
        ),
        ("tests/capture/test_carried_history.py::test_neurons_that_are_set_back_between_steps_are_planned",),
    ),
    Mutation(
        "functions-without-gradients",
        "Autograd functions between graphs do nothing where no gradient arrives.",
        "They are called with zeros, and weights behind them get gradients of zeros.",
        (
            Change(
                "planner/hooks/undefined_gradients.py",
                "            autograd.leave_out_functions_without_gradients(node)\n",
                "",
            ),
        ),
        ("tests/hooks/test_undefined_gradients.py::test_functions_of_python_do_nothing_without_a_gradient",),
    ),
    Mutation(
        "autocast-bfloat16",
        "A loop under autocast to bfloat16 trains as without a plan.",
        "The planned call runs outside of the region of autocast that it is in.",
        (
            Change(
                "planner/runtime/install.py",
                "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
                '        with torch.autocast("cpu", enabled=False):\n'
                "            return modules.call_with_forward(model, self._forward, args, kwargs)\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops_autocast.py::test_autocast_with_a_gradient_scaler[dtype0]",),
    ),
    Mutation(
        "autocast-backward",
        "Backward is not under autocast though the forward is.",
        "The backward is traced under the autocast of the forward.",
        (
            Change(
                "planner/_torch/joint/aot.py",
                '        backward_pass_autocast="off",\n',
                '        backward_pass_autocast="same_as_forward",\n',
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_autocast.py::test_backward_is_not_under_autocast_though_the_forward_is",
        ),
    ),
    Mutation(
        "autocast-float16-scaler",
        "Autocast to float16 with a GradScaler trains as without a plan, skipped steps included.",
        "Gradients of scalar outputs are taken to be one, as if the loss was never scaled.",
        (
            Change(
                "planner/lowering/partition.py",
                "        if original in self._tangents:\n            return self._tangents[original]\n",
                "        if original in self._tangents:\n"
                '            value = original.meta["val"]\n'
                "            if value.dim() == 0:\n"
                '                one = self.graph.call_function(torch.ones, ((),), {"dtype": value.dtype})\n'
                '                one.meta["val"] = value\n'
                "                return one\n"
                "            return self._tangents[original]\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops_autocast.py::test_autocast_with_a_gradient_scaler[dtype1]",),
    ),
    Mutation(
        "casts-are-shared",
        "A weight that is used twice in a region of autocast is cast once, as without a plan.",
        "Casts of one weight are left as AOTAutograd traces them, one for each use.",
        (
            Change(
                "planner/graph/passes/autocast_cast_cache.py",
                "    for casts in groups.values():\n        _share(joint, casts)\n",
                "",
            ),
        ),
        ("tests/behaviour/paths/test_loops_autocast.py::test_weights_that_are_used_twice_under_autocast",),
    ),
    Mutation(
        "calls-in-one-region",
        "Gradients of several calls inside one region of autocast are added as without a plan.",
        "Each call casts its gradients back by itself.",
        (
            Change(
                "planner/hooks/autocast_cast_cache.py",
                "            if later is not None:\n                total = later + total\n",
                "            if later is not None and not len(gradients):\n"
                "                total = later + total\n",
            ),
        ),
        (
            "tests/graph/test_autocast_cast_cache.py::test_gradients_of_calls_in_one_region_meet_as_without_a_plan[kind0]",
        ),
    ),
    Mutation(
        "planned-between-calls",
        "So are those of calls between which the module is planned again.",
        "What is noted of a region is lost with its casts, which planning frees.",
        (Change("planner/_torch/autocast_state.py", "again.update(notes)", "again.clear()"),),
        (
            "tests/graph/test_autocast_cast_cache.py"
            "::test_calls_of_other_sizes_that_are_planned_between_meet_as_without_a_plan[replan]",
        ),
    ),
    Mutation(
        "accumulation",
        "Gradients are accumulated over several backwards; zero_grad(set_to_none=False) keeps its tensors.",
        "A planned call drops the gradients that are there when it begins.",
        (DROPS_GRADIENTS,),
        (
            "tests/behaviour/paths/test_loops_autocast.py::test_accumulation_with_clipping_and_both_kinds_of_zero_grad",
        ),
    ),
    Mutation(
        "clipping",
        "Norms by which gradients are clipped are those without a plan, to the last bit.",
        "What the forward saves for the backward is rounded to bfloat16.",
        (
            Change(
                "planner/lowering/lowerings.py",
                "    return compile_graph(module, role, fixed_outputs=fixed, gradients=gradients)\n",
                "    import torch\n"
                "\n"
                "    run = compile_graph(module, role, fixed_outputs=fixed, gradients=gradients)\n"
                "\n"
                "    def rounding(args):\n"
                "        results = list(run(args))\n"
                '        for i in range(fixed if role == "forward" else len(results), len(results)):\n'
                "            if isinstance(results[i], torch.Tensor) and results[i].dtype is torch.float32:\n"
                "                results[i] = results[i].bfloat16().float()\n"
                "        return results\n"
                "\n"
                "    return rounding\n",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_autocast.py::test_accumulation_with_clipping_and_both_kinds_of_zero_grad",
        ),
    ),
    Mutation(
        "zero-grad-to-none",
        "After zero_grad(set_to_none=True) what the loss does not reach keeps no gradient at all.",
        "A planned call makes gradients of zeros where there are none.",
        (
            Change(
                "planner/runtime/install.py",
                "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
                "        for parameter in model.parameters():\n"
                "            if parameter.requires_grad and parameter.grad is None:\n"
                "                parameter.grad = torch.zeros_like(parameter)\n"
                "        return modules.call_with_forward(model, self._forward, args, kwargs)\n",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_losses.py::test_an_output_that_the_loss_stops_using_leaves_no_gradient[logits_loss]",
        ),
    ),
    Mutation(
        "several-losses",
        "Several losses and outputs, each with a backward of its own.",
        "Outputs without a gradient count as outputs with a gradient of zeros.",
        (ABSENT_IS_ZERO,),
        ("tests/behaviour/paths/test_loops_losses.py::test_two_losses_with_a_backward_each",),
    ),
    Mutation(
        "output-used-again",
        "An output that the loss stops using leaves no gradient, and one that it uses again does.",
        "Which outputs had no gradient is remembered from one backward to the next.",
        (
            Change(
                "planner/hooks/undefined_gradients.py",
                'self._next_call.__dict__.pop("absent", None)',
                'self._next_call.__dict__.get("absent", None)',
            ),
            Change(
                "planner/hooks/undefined_gradients.py",
                "        self._next_call.absent = absent or None",
                "        if absent:\n            self._next_call.absent = absent",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_losses.py::test_an_output_that_the_loss_stops_using_leaves_no_gradient[extra_loss]",
        ),
    ),
    Mutation(
        "unused-outputs",
        "A gradient for an output that the plan takes for unused is an error, not lost.",
        "Outputs that are cut off do not say so when they are used.",
        (
            Change(
                "planner/runtime/backend.py",
                "            UnusedOutputs(unused),\n",
                "            UnusedOutputs([]),\n",
            ),
        ),
        (
            "tests/runtime/test_install.py::test_a_gradient_where_the_plan_expects_none_is_an_error_not_a_zero",
        ),
    ),
    Mutation(
        "inputs-need-gradients",
        "Inputs that need gradients get them, and so does what comes before the module.",
        "The planned call detaches its inputs.",
        (DETACHES_INPUTS,),
        ("tests/behaviour/paths/test_loops_losses.py::test_inputs_that_need_gradients",),
    ),
    Mutation(
        "autograd-grad",
        "torch.autograd.grad gives the gradients of some or all parameters, and writes to none.",
        "The planned backward writes to .grad by itself, past the autograd engine.",
        (WRITES_GRADIENTS_ITSELF,),
        ("tests/behaviour/paths/test_loops_losses.py::test_autograd_grad_of_some_and_of_all_parameters",),
    ),
    Mutation(
        "optimizer-in-backward",
        "Optimizers that step in hooks after a gradient is accumulated do so.",
        "The planned backward writes to .grad by itself, past the autograd engine.",
        (
            WRITES_GRADIENTS_ITSELF,
            Change(
                "planner/hooks/arrival_order.py", "(ranks or tensors.has_hooks_on_arrival(given))", "ranks"
            ),
        ),
        ("tests/behaviour/paths/test_loops_parameters.py::test_an_optimizer_that_steps_inside_backward",),
    ),
    Mutation(
        "retain-graph",
        "backward(retain_graph=True), and backward once more.",
        "What the forward saves is donated to the backward.",
        (
            Change(
                "planner/_torch/joint/aot.py",
                "        _donate_nothing(forward, num_fwd_outputs)\n",
                "",
            ),
        ),
        ("tests/behaviour/paths/test_loops_losses.py::test_retain_graph",),
    ),
    Mutation(
        "double-backward",
        "Gradients of gradients (create_graph=True) are those without a plan, and it is said.",
        "Nothing looks whether a backward is to be differentiable.",
        (
            Change(
                "planner/hooks/double_backward.py",
                "def hook(context",
                "def unused(context",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_losses.py::test_a_gradient_penalty_falls_back_to_the_original_and_says_so",
        ),
    ),
    Mutation(
        "gradients-from-outside",
        "Gradients that are added to a shared weight's from outside the planned step give a warning.",
        "Nothing checks what gradients are added to.",
        (
            Change(
                "planner/hooks/external_accumulation_check.py",
                "def hook(context",
                "def unused(context",
            ),
        ),
        (
            "tests/capture/test_external_accumulation.py::test_a_weight_that_is_used_elsewhere_too_is_warned_of_once",
        ),
    ),
    Mutation(
        "gradients-from-outside-by-run",
        "Of code that runs several times in a step, each run's gradients are looked at.",
        "What a run returned is not noted as its own.",
        (
            Change(
                "planner/hooks/external_accumulation_check.py", "                self._sums = run.sums\n", ""
            ),
        ),
        (
            "tests/capture/test_external_accumulation.py::test_one_of_several_layers_is_warned_of[0-_backward]",
        ),
    ),
    Mutation(
        "iterators-taken-whole",
        "An iterator that a call takes whole between two graphs is left empty, as in eager.",
        "The code behind a graph is not told.",
        (
            Change(
                "planner/_torch/tracing/breaks/long_loops.py",
                "            self.index = len(self.items)\n",
                "",
            ),
        ),
        ("tests/_torch/test_long_loops.py::test_a_step_is_the_unplanned_one",),
    ),
    Mutation(
        "iterations-that-are-not-alike",
        "A capture serves all iterations of a loop only where what is left of the loop does not matter.",
        "How many items are left never counts.",
        (
            Change(
                "planner/_torch/tracing/breaks/long_loops.py",
                "    if iterator.is_exhausted or items.were_taken_together or iterator.items is not items:\n",
                "    if False:\n",
            ),
        ),
        ("tests/_torch/test_long_loops.py::test_a_step_is_the_unplanned_one",),
    ),
]
