"""End graphs, or go on, where Dynamo would refuse a forward that eager runs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo import utils
from torch._dynamo.variables import lists
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner._torch.fake import storage_key
from planner._torch.operators import uses_generator, written_arguments
from planner._torch.patches import replace
from planner._torch.tracing.breaks.calls_left_out import end_graph

IsOurs = Callable[[Any], bool]
"""Whether an instruction translator of Dynamo's traces for a planned module."""

# ---- numbers that change ---------------------------------------------------------------------------------


@functools.cache
def look_for_numbers_among_symbols(is_ours: IsOurs) -> None:
    """Find a number in a list of numbers of which some are symbols, as ``i in tasks`` where these change.

    Dynamo compares with constants alone, and says that it is not there.
    """
    contains = utils.iter_contains

    def among_symbols(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if is_ours(tx) and search.is_python_constant():
            value = search.as_python_constant()
            symbols = [item.sym_num for item in items if isinstance(item, SymNodeVariable)]
            if isinstance(value, int | float) and any(bool(symbol == value) for symbol in symbols):
                return ConstantVariable.create(True)
        return contains(items, search, tx, *args, **kwargs)

    for owner in (utils, lists):
        replace(owner, "iter_contains", among_symbols)


# ---- checkpoints of the user's that do more than run again ----------------------------------------------

_NORMALISE = {
    F.batch_norm: "training",
    F.instance_norm: "use_input_stats",  # which is on unless it is said
}
"""Functions that update running statistics if the argument of that name is true; no version counts it."""


@functools.cache
def break_at_checkpoints_with_effects(is_ours: IsOurs) -> None:
    """End a graph at a call of ``torch.utils.checkpoint`` that does more than run its part again.

    Without a plan buffers change once more when the backward runs the part again, and with
    ``preserve_rng_state=False`` other random numbers are drawn. So it is if it is left to run as it is
    written. With ``use_reentrant=True`` the part's parameters have gradients only where a
    tensor among the arguments has one.
    """
    call = CheckpointHigherOrderVariable._call_function

    def unless_it_does_more(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not is_ours(tx):
            return call(self, tx, args, kwargs)
        if torch.is_grad_enabled() and _is_reentrant(kwargs) and _gradients_end(args[1:]):
            why = "With use_reentrant=True gradients end here if no tensor given has one."
            end_graph("a checkpoint that gradients end at", why)
        draws_others, before = _is_false(kwargs.get("preserve_rng_state")), set(tx.output.nn_modules)
        result = call(self, tx, args, kwargs)
        for name, body in tx.output.nn_modules.items():
            if name not in before and isinstance(body, torch.fx.GraphModule):
                effects = _effects(body)
                if effects.changes or (effects.draws and draws_others):
                    why = "What torch.utils.checkpoint runs again changes buffers, or draws anew, each time."
                    end_graph("a checkpoint with effects", why)
        return result

    replace(CheckpointHigherOrderVariable, "_call_function", unless_it_does_more)


def _is_reentrant(options: dict[str, Any]) -> bool:
    return not _is_false(options.get("use_reentrant"))


def _is_false(option: Any) -> bool:
    return option is not None and option.as_python_constant() is False


def _gradients_end(args: list[Any]) -> bool:
    return not any(arg.requires_grad for arg in args if isinstance(arg, TensorVariable))


class _Effects(TorchDispatchMode):
    """Notes the side effects of a part of the forward: changes of its arguments, and random draws.

    Args:
        given: The arguments. Changes are found by their storage, as those through ``.data`` increment no
            version counter.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {storage_key(t) for t in given if isinstance(t, torch.Tensor)}
        self.changes = self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= uses_generator(func)
        if not self.changes:
            written = written_arguments(func, args, kwargs or {})
            self.changes = any(storage_key(t) in self._given for t in written)
        return func(*args, **(kwargs or {}))


def _effects(body: torch.fx.GraphModule) -> _Effects:
    parts = [part for part in body.modules() if isinstance(part, torch.fx.GraphModule)]
    values = [node.meta.get("example_value") for node in body.graph.find_nodes(op="placeholder")]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), contextlib.nullcontext())
    effects = _Effects()
    try:
        with mode, torch.no_grad():
            copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            effects = _Effects(copies)
            with effects:
                body(*copies)
    except Exception:  # whatever operators raise on tensors without data; what is written shows by its name
        effects.changes = any(str(node.target).endswith("_") for part in parts for node in part.graph.nodes)
        effects.draws = True  # it may
    effects.changes |= any(_updates_statistics(node) for part in parts for node in part.graph.nodes)
    return effects


def _updates_statistics(node: torch.fx.Node) -> bool:
    flag = _NORMALISE.get(node.target) if callable(node.target) else None
    if flag is None:
        return False
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    return given.get("running_mean") is not None and bool(given.get(flag, flag == "use_input_stats"))
