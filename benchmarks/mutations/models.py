"""Mutations that disable what is promised for models: what trains, and what becomes of a planned module."""

from benchmarks.mutations.record import Change, Mutation

_HELD = (
    "        first: list[Any] = []\n"
    "\n"
    "        def held(*args: Any) -> Any:\n"
    "            first[:] = first or args\n"
    "            return compiled.call(\n"
    "                *[f if isinstance(f, torch.nn.Parameter) else a for f, a in zip(first, args)]\n"
    "            )\n"
    "\n"
)
HOLDS_PARAMETERS = Change(
    "planner/runtime/backend.py",
    "        return CompiledGraph(compiled.call, hooks), followed\n",
    f"{_HELD}        return CompiledGraph(held, hooks), followed\n",
)
TRAINS_ALL = Change(
    "planner/training_step/copies.py",
    "    args, kwargs = _given_to(copied, module, step, faked)\n",
    "    copied.requires_grad_(True)\n    args, kwargs = _given_to(copied, module, step, faked)\n",
)


def _reused_buffers(made: str, key: str) -> Change:
    """What the forward saves lies in buffers that a later call writes to."""
    return Change(
        "planner/lowering/lowerings.py",
        "    return compile_graph(module, role, fixed_outputs=fixed, gradients=gradients)\n",
        "    import torch\n"
        "\n"
        "    run = compile_graph(module, role, fixed_outputs=fixed, gradients=gradients)\n"
        f"    held = {made}\n"
        "\n"
        "    def reusing(args):\n"
        "        inputs = {id(a) for a in args}\n"
        "        results = list(run(args))\n"
        '        for i in range(fixed if role == "forward" else len(results), len(results)):\n'
        "            value = results[i]\n"
        "            if isinstance(value, torch.Tensor) and id(value) not in inputs:\n"
        f"                buffer = held.setdefault({key}, torch.empty_like(value).detach())\n"
        "                results[i] = buffer.data.copy_(value.detach())\n"
        "        return results\n"
        "\n"
        "    return reusing\n",
    )


MODELS = [
    Mutation(
        "first-channels",
        "What observes each channel, in quantisation in training, runs as written until it has its size.",
        "Its operation is captured with no channels, and the first step ends in an error.",
        (
            Change(
                "planner/_torch/tracing/breaks/calls_left_out.py",
                'if 0 not in (getattr(lowest, "size", None) or ()):',
                "if True:",
            ),
        ),
        (
            "tests/behaviour/bits/test_quantisation_in_training.py"
            "::test_what_observes_each_channel_first_finds_out_how_many_there_are",
        ),
    ),
    Mutation(
        "hooks-of-quantisation",
        "What quantisation in training puts around modules is followed.",
        "Dynamo leaves out all of it, and there is no plan.",
        (Change("planner/_torch/tracing/dynamo_patches.py", '    "ao/quantization/quantize",\n', ""),),
        (
            "tests/behaviour/bits/test_quantisation_in_training.py"
            "::test_the_weights_and_what_was_observed_are_those_of_the_unplanned_steps",
        ),
    ),
    Mutation(
        "frozen-layers",
        "Frozen layers are planned as frozen, and stay so.",
        "A module is captured with all of its parameters trainable.",
        (TRAINS_ALL,),
        ("tests/behaviour/paths/test_loops_parameters.py::test_lora_in_a_frozen_transformer",),
    ),
    Mutation(
        "lora",
        "LoRA: the base stays frozen, the correction trains, the peak is the planned one.",
        "A module with a plan has all of its parameters trainable.",
        (
            Change(
                "planner/runtime/installed.py",
                "    vars(model)[Companion.NAME] = Companion(model)\n",
                "    vars(model)[Companion.NAME] = Companion(model)\n    model.requires_grad_(True)\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops_parameters.py::test_lora_in_a_frozen_transformer",),
    ),
    Mutation(
        "toggling-requires-grad",
        "Layers that are frozen and thawed after apply train by what is left of the plan.",
        "Where other parameters train than planned, nothing is recomputed.",
        (
            Change(
                "planner/runtime/backend.py",
                "            return remapped.backward, remapped.packed, {}\n        same = ",
                "            return no_recomputation(joint), (), {}\n        same = ",
            ),
        ),
        (
            "tests/behaviour/paths/test_loops_parameters.py::test_layers_that_are_frozen_and_thawed_after_apply_follow_the_plan",
        ),
    ),
    Mutation(
        "tied-weights",
        "Tied weights are one weight, whose gradients are added up as without a plan.",
        "Of per-use gradients only that of the last use is added up.",
        (
            Change(
                "planner/runtime/backend.py",
                "        absent = [i for i in spec.unused_outputs if",
                "        spec = GraphSpec((), frozenset(range(len(example_inputs))))\n"
                "        absent = [i for i in spec.unused_outputs if",
            ),
            Change(
                "planner/graph/trace.py",
                "*[args[i] for i in added])",
                "*[args[i].detach() for i in added])",
            ),
        ),
        ("tests/behaviour/paths/test_loops_parameters.py::test_tied_weights",),
    ),
    Mutation(
        "tied-across-graphs",
        "The uses of a weight in several graphs are added up in the order in which they are without a plan.",
        "Graphs are never asked for per-use gradients.",
        (
            Change(
                "planner/capture/external_accumulation.py",
                "    for graph, positions in asked.items():\n",
                "    for graph, positions in dict[int, set[int]]().items():\n",
            ),
        ),
        (
            "tests/graph/test_per_use_gradients.py::test_uses_add_up_as_without_a_plan_where_sizes_are_symbols",
        ),
    ),
    Mutation(
        "weight-norm",
        "torch.nn.utils.weight_norm, whose weights are made by a hook before each forward.",
        "Only parameters and buffers lose their data in the copy that is captured.",
        (
            Change(
                "planner/module_parts.py",
                "        for held in (*part._parameters.values(), *part._buffers.values(), *others)\n",
                "        for held in (*part._parameters.values(), *part._buffers.values())\n",
            ),
        ),
        (
            "tests/behaviour/modules/test_module_parts.py::test_the_copy_that_is_captured_has_no_data_in_other_attributes_either",
        ),
    ),
    Mutation(
        "spectral-norm",
        "spectral_norm: its buffers are updated once a step, and never read again after that.",
        "Operations that read what the step overwrites may be run again.",
        (
            Change(
                "planner/graph/joint_graph.py",
                "        return self.rule.repeatable(self.node) and not self.reads_mutated\n",
                "        return True\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops_parameters.py::test_parametrizations_and_their_buffers",),
    ),
    Mutation(
        "ema",
        "An average of weights that is kept in a deep copy is computed with the copy's weights.",
        "Deep copies share the installed call, which is bound to the original.",
        (
            Change(
                "planner/runtime/installed.py",
                "        call.install_in(copied)\n",
                "        modules.install_call(copied, call)\n",
            ),
            Change(
                "planner/_torch/modules.py",
                "            return None if same else called\n",
                "            return None\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_an_average_of_weights_kept_in_a_copy",),
    ),
    Mutation(
        "deepcopy",
        "A deep copy of a planned module trains by the plan.",
        "Deep copies are made without the plan.",
        (
            Change(
                "planner/runtime/installed.py",
                "        call.install_in(copied)\n",
                "        modules.install_call(copied, None)\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_copies_and_pickles_train_by_the_plan",),
    ),
    Mutation(
        "pickle",
        "pickle and torch.save(model): what is loaded trains by the plan.",
        "Pickles hold no plan.",
        (
            Change(
                "planner/runtime/installed.py",
                "        if not isinstance(call, InstalledCall):\n            return Companion,",
                "        if call is not None:\n            return Companion,",
            ),
        ),
        ("tests/runtime/test_install.py::test_copies_and_pickles_train_by_the_plan",),
    ),
    Mutation(
        "no-grad-between",
        "A forward under no_grad, or in eval mode, is the module's own.",
        "Forwards under no_grad go through the plan.",
        (
            Change(
                "planner/runtime/plan_call.py",
                "        if not torch.is_grad_enabled():\n            return self.run_original\n",
                "",
            ),
        ),
        ("tests/runtime/test_install.py::test_eval_no_grad_and_inference_mode_run_the_original",),
    ),
    Mutation(
        "no-grad-state",
        "A forward under no_grad between two training forwards changes nothing of theirs.",
        "After a forward without gradients the module runs without its plan.",
        (
            Change(
                "planner/runtime/plan_call.py",
                "        if not torch.is_grad_enabled():\n",
                "        if not torch.is_grad_enabled():\n            self._training = False\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_forwards_without_gradients_and_in_eval_mode_in_between",),
    ),
    Mutation(
        "gan",
        "Two planned modules in one step, as in a GAN.",
        "What forwards save lies in buffers that all planned modules share.",
        (
            _reused_buffers("_HELD", "(i, value.shape, value.dtype)"),
            Change(
                "planner/lowering/lowerings.py",
                "class Lowering(Protocol):\n",
                "_HELD = {}\n\n\nclass Lowering(Protocol):\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_a_generator_and_a_discriminator",),
    ),
    Mutation(
        "called-twice",
        "The same module called twice in one step.",
        "What a forward saves lies in buffers that its next call writes to.",
        (_reused_buffers("{}", "i"),),
        (
            "tests/behaviour/modules/test_installed_steps.py::test_a_module_called_twice_in_one_step",
            "tests/behaviour/paths/test_loops.py::test_one_module_called_twice_in_a_step",
        ),
    ),
    Mutation(
        "two-instances",
        "One plan on two instances; each runs its own weights.",
        "The plan is installed in the module's class.",
        (
            Change(
                "planner/_torch/modules.py",
                "    module._compiled_call_impl = call\n",
                "    type(module)._compiled_call_impl = call\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_one_plan_on_two_instances",),
    ),
    Mutation(
        "generate",
        "Hugging Face's generate() between training steps, in train and in eval mode.",
        "Calls that run the original lose their keyword arguments.",
        (
            Change(
                "planner/runtime/installed.py",
                "            return modules.module_call(self._model, *args, **kwargs)\n",
                "            return modules.module_call(self._model, *args)\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_generating_between_training_steps",),
    ),
    Mutation(
        "to-dtype",
        "model.to(dtype) after apply: right, and said where it takes more memory.",
        "Operations that produce more bytes than planned give no warning.",
        (
            Change(
                "planner/runtime/backend.py",
                "if not same and grown(record, joint) and not self._warned_of_shapes():",
                "if not same and grown(record, joint) and self._warned_of_shapes():",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_another_dtype_after_apply_is_said_and_right[dtype1]",),
    ),
    Mutation(
        "to-device",
        "model.to(device) and back after apply (here the meta device and the CPU): the plan goes on.",
        "A module whose parameters are other tensors than at apply runs without its plan.",
        (
            Change(
                "planner/runtime/install.py",
                "        self._warned_of_casts = False\n",
                "        self._warned_of_casts = False\n"
                "        self._known = [id(p) for p in model.parameters()]\n",
            ),
            Change(
                "planner/runtime/install.py",
                "        hooks = modules.hooks_on_all_modules()\n",
                "        if self._known != [id(p) for p in model.parameters()]:\n"
                "            return modules.module_call(model, *args, **kwargs)\n"
                "        hooks = modules.hooks_on_all_modules()\n",
            ),
        ),
        ("tests/behaviour/paths/test_loops.py::test_new_weights_and_a_trip_to_another_device",),
    ),
    Mutation(
        "load-state-dict",
        "load_state_dict after apply, with and without assign=True.",
        "Graphs hold on to the parameters of their first call.",
        (HOLDS_PARAMETERS,),
        ("tests/behaviour/paths/test_loops.py::test_new_weights_and_a_trip_to_another_device",),
    ),
    Mutation(
        "operators-taken-apart",
        "addcmul_ and the like round as they do without a plan.",
        "Dynamo takes them apart.",
        (
            Change(
                "planner/_torch/dynamo.py",
                '    "enable_dynamo_decompositions": False,\n',
                "",
            ),
        ),
        (
            "tests/behaviour/bits/test_round_like_eager.py::test_an_operator_with_a_factor_is_as_without_a_plan",
        ),
    ),
    Mutation(
        "named-results",
        "What is kept of a model's graphs holds no numbers that were computed while they were captured.",
        "It holds those of operators that return several results.",
        (
            Change(
                "planner/_torch/joint/graph_modules.py",
                "    if isinstance(value, (tuple, list)):",
                "    if type(value) in (tuple, list):",
            ),
        ),
        (
            "tests/behaviour/memory/test_captures_hold_nothing.py::"
            "test_a_step_that_captures_takes_no_more_than_later_ones[Largest-8]",
        ),
    ),
    Mutation(
        "plain-gradients",
        "Parameters of a class that holds a tensor are planned, whatever class their gradients are of.",
        "Those of plain gradients are looked for among the inputs that are tensors themselves.",
        (
            Change(
                "planner/graph/accumulation.py",
                "if results[i] is not None and p in inputs}",
                "if results[i] is not None}",
            ),
        ),
        ("tests/behaviour/bits/test_tensor_subclasses.py::test_parameters_of_classes_of_the_users",),
    ),
    Mutation(
        "memory-let-go-of-by-resizing",
        "Memory that a forward lets go of by emptying storages is not counted.",
        "Nobody sees it, and invertible layers are predicted at twice what they take.",
        (
            Change(
                "planner/training_step/recorder.py",
                "        number = -1 if self._paused else self._known.get(key, -1)\n        if number",
                "        number = -1\n        if number",
            ),
        ),
        (
            "tests/behaviour/memory/test_freed_inputs.py::test_memory_that_a_forward_lets_go_of_is_not_counted[graph]",
        ),
    ),
]
