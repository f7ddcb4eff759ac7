"""Every patch of PyTorch, and the only code that makes one.

A patch is a row of :data:`PATCHES`. The functions below refuse to replace what has no row, and
``tests/house/test_patches_of_pytorch.py`` finds assignments to PyTorch's objects that go around them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Patch:
    """A function, attribute or table entry of PyTorch that we replace.

    Attributes:
        target: Its full name; for an entry of a table, the name of the table, and which entries.
        why: The fault without the patch, in a line.
        test: The file of tests that fails without it.
        for_good: Whether it stays for the life of the process. It then asks who calls, and does as PyTorch
            does for all other callers.
        since: The first version of PyTorch that has the target, ``(major, minor)``.
    """

    target: str
    why: str
    test: str
    for_good: bool = False
    since: tuple[int, int] = (2, 13)


_DYNAMO = "torch._dynamo"
_VARIABLES = "torch._dynamo.variables"
_AOT = "torch._functorch"
_INDUCTOR = "torch._inductor"

PATCHES = (
    # ---- modules ------------------------------------------------------------------------------------------
    Patch(
        "torch.nn.modules.module.Module.__copy__",
        "copy.copy(planned) would share what is installed in the original, and train that",
        "test_state_of_copies",
        for_good=True,
    ),
    Patch(
        "torch.fx.graph_module.GraphModule.__copy__",
        "the same of graph modules",
        "test_state_of_copies",
        True,
    ),
    Patch(
        "torch.nn.utils.parametrize._cache",
        "a re-run inside parametrize.cached() would read what the first run computed",
        "test_exact_steps",
    ),
    # ---- the step that is recorded ------------------------------------------------------------------------
    Patch(
        "torch.get_rng_state",
        "checkpoints save states of the generator, whose memory no dispatch mode sees",
        "test_user_checkpoints",
    ),
    Patch(
        "torch.storage.UntypedStorage.resize_",
        "invertible layers let go of their inputs' memory, which no dispatch mode sees",
        "test_freed_inputs",
    ),
    Patch(
        "torch.ctc_loss",
        "without data its lengths are unknown, and it takes another path than with them",
        "test_told_by_data",
    ),
    Patch(
        "transformers.utils.import_utils.is_fake_tensor",
        "masks whose values are known would be treated as if they had none",
        "test_known_values",
    ),
    Patch(
        "torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT",
        "lists of numbers lose their values without data, and decide sizes",
        "test_constant_lists",
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensorMode.cache",
        "what PyTorch remembers of calls without data has its own layouts, not those of the kernels",
        "test_layouts",
    ),
    Patch(
        "torch._meta_registrations._meta_grouped_mm_common",
        "it refuses float32, which the CPU's kernel takes",
        "test_trace",
        for_good=True,
    ),
    Patch(
        "operators without data",
        "shape functions whose strides, or whose number of results, are not the kernel's",
        "test_layouts",
        for_good=True,
    ),
    Patch(
        "torch._meta_registrations.device_hint",
        "shape functions whose strides are the CPU's where a GPU is planned for",
        "test_gpu_elsewhere",
    ),
    Patch(
        "torch._C._conv_determine_backend_memory_format",
        "convolutions whose results lie as the CPU's do where a GPU is planned for",
        "test_gpu_elsewhere",
    ),
    *(
        Patch(
            f"torch.amp.autocast_mode.autocast.{name}",
            "regions of autocast for CUDA would be off, and those for the CPU on, where a GPU is planned for",
            "test_cuda_autocast",
        )
        for name in ("__init__", "__enter__", "__exit__")
    ),
    Patch("decompositions", "decompositions whose results lie otherwise than the kernel's", "test_layouts"),
    Patch(
        "kernels in Python",
        "dispatched in Python, operators are decomposed; and those that CUDA would run are not the CPU's",
        "test_cuda_kernels",
    ),
    Patch(
        "kernels for autocast",
        "operators that autocast has no rule for would not cast what they call inside",
        "test_cast_inside",
        for_good=True,
    ),
    # ---- Dynamo, for captures of ours ---------------------------------------------------------------------
    Patch(
        f"{_DYNAMO}.eval_frame._callback_from_stance",
        "torch.compiler.set_stance() would give our captures another backend, or none",
        "test_switches",
        for_good=True,
    ),
    Patch(
        f"{_DYNAMO}.eval_frame._stance",
        "a stance that skips guards would run code of another step",
        "test_switches",
    ),
    Patch(
        "torch.compiler._compile_session_context",
        "optimizers that step in another thread meanwhile would be told that they are compiled",
        "test_threads",
    ),
    Patch("torch.compiler._is_compiling_flag", "the same", "test_threads"),
    Patch(
        f"{_DYNAMO}.convert_frame.trace_frame",
        "it saves the generator's state, which would count as memory of the step",
        "test_random_state",
    ),
    Patch(f"{_AOT}.aot_autograd.preserve_rng_state", "the same of AOTAutograd", "test_random_state"),
    Patch(
        f"{_DYNAMO}.symbolic_convert.InstructionTranslatorBase.maybe_has_backedge",
        "a function with a break in a loop would not be captured at all",
        "test_long_loops",
        for_good=True,
    ),
    Patch(
        f"{_DYNAMO}.symbolic_convert.InstructionTranslatorBase.run",
        "a break ten calls below would be looked for once by each frame on the way",
        "test_known_breaks",
        for_good=True,
    ),
    Patch(
        f"{_DYNAMO}.symbolic_convert.InstructionTranslatorBase.log_graph_break",
        "the same: it notes where",
        "test_known_breaks",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.iter.DictViewIterator.reconstruct",
        "a break in a loop over an nn.ModuleDict could not go on",
        "test_long_loops",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.builder.VariableBuilder.wrap_tuple_iterator",
        "each iteration of a loop that breaks would be captured anew",
        "test_long_loops",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.lists.ListIteratorVariable.unpack_var_sequence",
        "tuple(iterator) would not move the iterator that goes on behind a break",
        "test_long_loops",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.builder.VariableBuilder._wrap",
        "results.append on the stack of a break would be captured anew in every step",
        "test_long_loops",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.nn_module.UnspecializedNNModuleVariable.call_function",
        "regions, planned modules and cuDNN's recurrent layers would be traced into",
        "test_regions",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.tensor.TensorVariable.method_backward",
        "a backward inside of the forward would pass by hooks",
        "test_gradients_inside",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.tensor.TensorVariable.method___setitem__",
        "AOTAutograd refuses a write through a mask that needs a gradient",
        "test_writes_at_indices",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.misc.AutogradFunctionVariable.call_apply",
        "under torch.func a function of the user's would be differentiated without its own backward",
        "test_gradients_inside",
        for_good=True,
    ),
    Patch(
        f"{_VARIABLES}.higher_order_ops.CheckpointHigherOrderVariable._call_function",
        "a checkpoint that updates buffers would update them once instead of twice, and a reentrant one "
        "have gradients that it has not in eager",
        "test_refused",
        for_good=True,
    ),
    Patch(
        f"{_DYNAMO}.utils.iter_contains",
        "a number would not be found in a list of which some are symbols",
        "test_changing_numbers",
        for_good=True,
    ),
    Patch(f"{_VARIABLES}.lists.iter_contains", "the same", "test_changing_numbers", for_good=True),
    Patch(f"{_DYNAMO}.guards.profile_guard_manager", "time: 25 ms for each graph", "test_aot_logs"),
    Patch(
        f"{_VARIABLES}.tensor.TensorVariable._warn_capture_scalar_outputs",
        "it recommends a setting that no plan is made with",
        "test_aot_logs",
    ),
    # ---- AOTAutograd --------------------------------------------------------------------------------------
    Patch(
        f"{_AOT}._aot_autograd.runtime_wrappers.AOTDispatchAutograd.post_compile",
        "results that are views would be handed out with other strides",
        "test_strides_of_results",
    ),
    Patch(
        f"{_AOT}._aot_autograd.runtime_wrappers._FirstInvocationContext.__init__",
        "first calls would go through a dispatch mode that refuses subclasses of tensors",
        "test_tensor_subclasses",
    ),
    Patch(
        f"{_AOT}.aot_autograd.run_functionalized_fw_and_collect_metadata",
        "tangents are traced as they lie in the step",
        "test_tangent_layouts",
    ),
    Patch(
        "torch.fx.passes._tensorify_python_scalars._is_tensorify_enabled",
        "numbers of symbolic sizes would be tensors, which round otherwise",
        "test_gradients_at_other_sizes",
    ),
    Patch(
        "torch._subclasses.functional_tensor.FunctionalTensorMode.__torch_dispatch__",
        "results of writes in place would have strides of their functional forms",
        "test_in_place",
    ),
    # ---- Inductor -----------------------------------------------------------------------------------------
    Patch(
        f"{_INDUCTOR}.codegen.cpp.CppScheduling.ready_to_flush",
        "kernels would run together whose results are then held together",
        "test_inductor_fusion",
    ),
    Patch(
        f"{_INDUCTOR}.scheduler.Scheduler.can_fuse",
        "fusions across calls of libraries hold what they read (pytorch 187842)",
        "test_inductor_fusion",
    ),
    Patch(
        f"{_INDUCTOR}.codegen.wrapper.EfficientPeakEstimate",
        "freed memory would be held for reuse where that raises the peak",
        "test_inductor_reuse",
    ),
    Patch(
        f"{_INDUCTOR}.codecache.PyCodeCache.load_by_key_path",
        "a program that is only counted would be loaded, and its kernels compiled",
        "test_inductor_cache",
    ),
    Patch(
        f"{_INDUCTOR}.async_compile.AsyncCompile",
        "kernels would be compiled one by one, or for a count of bytes",
        "test_inductor_kernels",
    ),
    # ---- Inductor, for a GPU that is not here -------------------------------------------------------------
    Patch("devices of Inductor", "it would ask a driver for the GPU's properties", "test_inductor_elsewhere"),
    Patch("torch.cuda.get_device_properties", "the same", "test_inductor_elsewhere"),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.is_cuda",
        "attention without data would be lowered as one that is not on a GPU",
        "test_inductor_elsewhere",
    ),
    Patch(
        f"{_INDUCTOR}.scheduler.has_triton",
        "it would ask for Triton and a driver, to emit the text of kernels",
        "test_inductor_elsewhere",
    ),
    Patch("torch.utils._triton.triton_hash_with_backend", "the same", "test_inductor_elsewhere"),
    Patch(
        f"{_INDUCTOR}.utils.is_big_gpu",
        "it would remember the GPU, for templates that are chosen by timing, which no plan for a GPU has",
        "test_inductor_elsewhere",
    ),
    *(
        Patch(
            f"{_INDUCTOR}.{module}.needs_fallback_due_to_atomic_add_limitations",
            "sums in bfloat16 by index would be kernels on GPUs that have none for them",
            "test_inductor_elsewhere",
        )
        for module in ("utils", "lowering", "decomposition")
    ),
    # ---- Dynamo's handlers of functions, all of which stay ------------------------------------------------
    Patch(
        "handler: questions",
        "libraries compute otherwise where torch.compiler.is_compiling() says so",
        "test_inductor",
        for_good=True,
    ),
    Patch(
        "handler: operators taken apart",
        "addcdiv, lerp, bilinear and the observers of quantisation round otherwise in pieces",
        "test_round_like_eager",
        for_good=True,
    ),
    Patch(
        "handler: settings",
        "a call that sets how PyTorch computes would run before or behind its graph",
        "test_process_settings",
        for_good=True,
    ),
    Patch(
        "handler: gradients",
        "gradients of gradients through a function of the user's would be missing",
        "test_gradients_inside",
        for_good=True,
    ),
    Patch(
        "handler: set up once",
        "the first forward of Hugging Face's models would be another than all that follow",
        "test_first_forward",
        for_good=True,
    ),
)
"""What is replaced of PyTorch, by subject."""

_ROWS = {row.target: row for row in PATCHES}


def replace(owner: Any, name: str, new: Any) -> None:
    """Replace a function of one of PyTorch's files, or a method of one of its classes, for good."""
    _row(_name_of(owner, name), for_good=True)
    setattr(owner, name, new)
    # From 2.14 on, Dynamo looks up in a table of the class what a method of a tensor does.
    entry = vars(owner).get("tp_methods", {}).get(name.removeprefix("method_"))
    if entry is not None:
        entry.handler = new


@contextlib.contextmanager
def replaced(owner: Any, new: Mapping[str, Any]) -> Iterator[None]:
    """Within this, attributes of a module or a class of PyTorch's are others."""
    with contextlib.ExitStack() as stack:
        for name, value in new.items():
            _row(_name_of(owner, name))
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def replace_entries(target: str, table: Any, new: Mapping[Any, Any]) -> None:
    """Replace entries of one of PyTorch's dictionaries or lists, for good."""
    _row(target, for_good=True)
    for key, value in new.items():
        table[key] = value


@contextlib.contextmanager
def replaced_entries(target: str, table: dict[Any, Any], new: Mapping[Any, Any]) -> Iterator[None]:
    """Within this, entries of one of PyTorch's tables are others; those that are None are left out."""
    _row(target)
    before = {key: table[key] for key in new if key in table}
    try:
        for key, value in new.items():
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        yield
    finally:
        for key in new:
            table.pop(key, None)
        table.update(before)


@contextlib.contextmanager
def kernels_replaced(new: Mapping[Any, Mapping[Any, Callable[..., Any] | None]]) -> Iterator[None]:
    """Within this, operators run other kernels where they are dispatched in Python: by operator and key."""
    with contextlib.ExitStack() as stack:
        for operator, kernels in new.items():
            stack.callback(operator._dispatch_cache.clear)
            stack.enter_context(replaced_entries("kernels in Python", operator.py_kernels, kernels))
            operator._dispatch_cache.clear()
        yield


def _name_of(owner: Any, name: str) -> str:
    home = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{home}.{name}"


def _row(target: str, *, for_good: bool = False) -> Patch:
    row = _ROWS.get(target)
    if row is None:
        raise LookupError(f"{target} is replaced and has no row in PATCHES: add one, or do without")
    if for_good and not row.for_good:
        raise LookupError(f"{target} is replaced for good, and its row in PATCHES says it is not")
    return row


def handler_row(subject: str) -> Patch:
    """The row of a handler of Dynamo's."""
    return _row(f"handler: {subject}", for_good=True)


def library_row(subject: str) -> Patch:
    """The row of kernels that are registered for operators of others."""
    return _row(subject, for_good=True)
