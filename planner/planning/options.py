"""The options of planning, in one place: what they are called, what they may be, and what they mean.

A new option is a field of :class:`PlanOptions` here, with its keyword in :class:`StepKeywords` and its check;
a field of ``StepOptions`` of the command line (`planner/cli/options.py`); and the code that uses it.
"""

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, get_args

import torch

from planner.choices import (
    Attention,
    BackendChoice,
    CostSource,
    Encodings,
    InputsAre,
    Offload,
    Outputs,
    SplitWhat,
)
from planner.costs.devices import Device
from planner.costs.optimizer_step import Optimizer, optimizer_class
from planner.graph.overwritten import checked_inputs
from planner.parallel.recorded import parallel_of
from planner.parallel.strategies import Parallel, read_parallel
from planner.planfile.plan import PlanRecord
from planner.planfile.schema import MOST_IN_FLIGHT
from planner.training_step.inputs import InputError
from planner.training_step.regions import Regions
from planner.training_step.step import Loss, checked_outputs
from solvers.effort import Effort
from solvers.registry import SOLVERS

_F = TypeVar("_F", bound=Callable[..., Any])


class OptionError(InputError, ValueError):
    """An option is unknown, of another kind, or out of its range."""


class StepKeywords(TypedDict, total=False):
    """Keywords of every function that plans, about the step; :class:`PlanOptions` says what they mean."""

    loss: Loss | None
    outputs: Outputs
    optimizer: Optimizer | None
    device: str | torch.device | Device | None
    attention: Attention | None
    accumulate: bool | None
    in_flight: int | None
    costs: CostSource
    training: bool
    inputs: InputsAre
    effort: Effort
    encodings: Encodings
    offload: Offload
    host_budget: int | str | None
    regions: Regions
    parallel: Parallel
    unproven: bool


class SearchKeywords(TypedDict, total=False):
    """Keywords about the search, once a step is captured; :class:`PlanOptions` says what they mean."""

    solver: str
    time_limit: float
    keep: Sequence[str]
    recompute: Sequence[str]
    checkpoints: Sequence[str]


class SplitKeywords(StepKeywords, total=False):
    """Keywords of :func:`planner.sweep` and :func:`planner.max_batch`; :class:`PlanOptions` says what they
    mean."""

    split: SplitWhat


class CaptureKeywords(SplitKeywords, total=False):
    """Keywords of :func:`planner.prepare`; :class:`PlanOptions` says what they mean."""

    backend: BackendChoice
    backend_options: Mapping[str, bool | int | float | str]


class PlanKeywords(CaptureKeywords, SearchKeywords, total=False):
    """Keywords of :func:`planner.plan`; :class:`PlanOptions` says what they mean."""


class PreparedKeywords(SearchKeywords, total=False):
    """Keywords of :meth:`planner.PreparedStep.plan`; :class:`PlanOptions` says what they mean."""

    effort: Effort
    encodings: Encodings


Keywords = StepKeywords | SearchKeywords


@dataclass(frozen=True, eq=False)
class PlanOptions:
    """What a step is planned with, besides the model, its inputs and the budget.

    A plan remembers it, to plan again for other shapes. It is no part of the plan: files do not hold it,
    copies by pickle lose it (losses can often not be pickled), and plans that differ in nothing else are
    equal.

    Attributes:
        loss: Makes the scalar loss of the module's output, where the module does not return it
            (itself, or as ``output.loss``). Without either, the step differentiates all outputs,
            and scalars that the forward leaves in attributes of its modules, as experts' losses for their
            balance.
        outputs: Whether the training loop still has the module's outputs while backward runs: "held", as
            in ``out = model(x); out.loss.backward()``, or "dropped", as in ``model(x).loss.backward()`` and
            in trainers, which pass on the loss alone. Dropped outputs are not counted.
        optimizer: An instance, class or name; its state counts as resident, and its step must fit.
        device: Where the step will run: None for where the model is, or the name of a device.
        attention: Planning for a GPU without one: the kernel of scaled dot product attention, "cudnn",
            "flash", "efficient" or "math"; None for what PyTorch would choose there.
        accumulate: Whether gradients are there already when the step begins and are added to, as with
            several micro-batches a step; None: as the parameters' are now.
        in_flight: For a stage of a pipeline (``torch.distributed.pipelining``): how many micro-batches have
            had their forward when the first backward begins: with GPipe all, with 1F1B as many as there are
            stages from this one to the last. What one holds between its forward and its backward counts so
            many times. With ``accumulate=True`` more micro-batches follow, one forward after each backward.
        costs: Where the seconds of operations come from: "roofline", from the device's figures; "measured",
            which times each distinct one on the device at hand and remembers it; or "auto", which measures
            where the device is at hand and timing takes seconds, not minutes. "auto" is the roofline where
            several ranks train, since each would measure and plan something else, and for ``max_batch`` and
            estimates.
        training: Whether the module will train in training mode, in which it is planned whatever mode it is
            in now; False for evaluation mode (dropout off, running statistics as they are).
        inputs: What happens to inputs, buffers and biases between forward and backward: "unchanged", then
            the backward may read them again, or "overwritten", then it reads copies, whose bytes count.
        effort: How long solver "auto" searches: "fast" answers in seconds, "best" goes on for up to a
            minute, for extra time that is lower by some tenths of a percent of the step, and by several near
            the least peak.
        encodings: "auto" keeps masks (of dropout, say) as bits, eight to a byte, where that is better than to
            keep them as they are or to draw them again, and of a result of ReLU one bit for each element,
            where only its backward needs it; "none" does not. On the CPU only; searches for the largest
            batch do without.
        offload: "disk" may send results that the backward reads to files that are mapped into memory, and
            fetch them where it reads them, so that they take no memory of the CPU in between; "host" is for
            GPUs, and the host's memory. Transfers run while the step
            computes. "none" sends nothing.
        host_budget: The most bytes that may be kept there, "64GiB" say; None for as many as it takes.
        backend: What runs the plan. "auto": graphs where the step is few of them, all of it is in them and
            nothing is warned of, else "replay"; the plan says which, and why. With ``regions``, stages of
            pipelines and ``fully_shard``: graphs. "graph" (or "eager"): the step's graphs, operators one by
            one, bit for bit as without a plan. "replay": the module as it is, of which operators run again
            as the backward asks for what the plan dropped; some ten microseconds more for each operator.
            "inductor": the programs that Inductor makes of the graphs, as under ``torch.compile``. The plan's
            peak is then that of these programs, for one shape at a time; on a GPU it takes unproven=True.
            "cudagraphs": as "graph", with forward and backward recorded as two CUDA graphs, so that Python
            launches no kernels; draws are kept, not repeated. It takes unproven=True.
        backend_options: Options of Inductor, as ``torch.compile(options=)`` takes them. With
            ``{"triton.cudagraphs": True}``, which ``torch.compile(mode="reduce-overhead")`` sets, the
            compiled forward and backward are recorded as two CUDA graphs, as by backend="cudagraphs".
        split: "loss" may compute what ends in the loss in pieces of rows, one after the other: logits and
            what the loss makes of them are then never there as a whole. It takes outputs="dropped", and few
            graphs. Gradients are as near to the true ones as without a plan, and not equal in the last bits,
            since sums over rows are added up in another order. "auto" may compute MLPs so as well. "none":
            nothing is. "min" is then the fastest plan that takes at most 2 % of the unplanned step's peak
            more than the least.
        solver: A name in ``solvers.SOLVERS``, or "auto" for the best that fits.
        time_limit: Wall seconds for the solver. Half as many are added for masks as bits or for results on
            the host (several times for "min"), and as many again for a GPU and a budget in bytes.
        keep: Never recompute what matches: module paths ("encoder.layer.0"), operators
            ("aten.native_layer_norm") or patterns of either ("encoder.layer.*.attention").
        recompute: Never keep what matches.
        checkpoints: Keep the results of these modules and recompute all else, if nothing else is
            said by ``solver="manual"``: checkpointing by hand.
        regions: Submodules that have a forward, a backward and an autograd node of their own each, planned
            together as one step: module paths or patterns (["model.layers.*"]), or "auto" for submodules of
            one class that repeat in an nn.ModuleList or nn.Sequential. Their gradients are there as soon as
            their own backward has run, as DistributedDataParallel and ``fully_shard`` want them.
        parallel: Training on many ranks, which need not be here: ``planner.FSDP2(world_size=8)``,
            ``planner.DDP(world_size=8)``, or their text, as "fsdp2:8". The prediction and the budget are then
            one rank's: its shards, gathered parameters, buffers of communication and sharded optimizer. What
            ``fully_shard`` shards are the regions, "auto" if none are named, and the rest with the root.
        unproven: Whether to allow what has never run on a GPU: backend="inductor" there, and
            backend="cudagraphs". Let :func:`planner.verify` compare such a plan before you train by it.
    """

    loss: Loss | None = None
    outputs: Outputs = "held"
    optimizer: Optimizer | None = None
    device: str | torch.device | Device | None = None
    attention: Attention | None = None
    accumulate: bool | None = None
    in_flight: int | None = None
    costs: CostSource = "auto"
    training: bool = True
    inputs: InputsAre = "unchanged"
    effort: Effort = "fast"
    encodings: Encodings = "auto"
    offload: Offload = "none"
    host_budget: int | str | None = None
    backend: BackendChoice = "auto"
    backend_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    split: SplitWhat = "none"
    solver: str = "auto"
    time_limit: float = 60
    keep: Sequence[str] = ()
    recompute: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    regions: Regions = None
    parallel: Parallel = None
    unproven: bool = False

    def without_timing(self) -> "PlanOptions":
        """The same, with nothing timed that was not asked for."""
        return replace(self, costs="roofline") if self.costs == "auto" else self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # so a copy of a plan is as one from a file


def read_options(of: str, known: type[Keywords], given: Mapping[str, Any], **others: Any) -> PlanOptions:
    """The options that a function was called with, checked before the long work.

    Args:
        of: The function's name, for errors.
        known: The options that it takes as ``**options``.
        given: Those that it was given.
        others: Further options, which it names in its signature.

    Raises:
        OptionError: There is no such option, or it is of another kind.
        OutputsError, InputsError: ``outputs`` or ``inputs`` has neither of its two values.
        ParallelError: ``parallel`` is no known strategy, or a value of it is out of range.
        OptimizerError: ``optimizer`` is not an optimizer.
    """
    for name in given:
        if name not in known.__annotations__:
            near = difflib.get_close_matches(name, known.__annotations__, 1)
            hint = f": did you mean {near[0]}=?" if near else ""
            raise OptionError(f"{of}() got an unexpected keyword argument {name!r}{hint}")
    options = PlanOptions(**given, **others)
    check_options(**{f.name: getattr(options, f.name) for f in fields(options) if f.name in _CHECKS})
    if options.backend == "graph":
        options = replace(options, backend="eager")
    checked_inputs(options.inputs)
    checked_outputs(options.outputs)
    read_parallel(options.parallel)
    if options.optimizer is not None:
        optimizer_class(options.optimizer)
    return options


def refuse_in_flight(of: str, options: PlanOptions) -> None:
    """See that micro-batches in flight, and results on the host, are not asked of what knows neither.

    Raises:
        OptionError: They are.
    """
    if options.in_flight is not None:
        raise OptionError(f"in_flight= is for planner.plan, prepare and sweep: expected none for {of}()")
    if options.offload != "none":
        raise OptionError(f"offload= is for planner.plan, prepare and sweep: expected 'none' for {of}()")


def options_of(plan: PlanRecord) -> PlanOptions:
    """What a plan was made with besides the model; of a plan that was read from a file little is known."""
    if isinstance(plan.made_with, PlanOptions):
        return replace(plan.made_with, inputs=plan.target.inputs, backend=plan.target.backend)
    return PlanOptions(
        unproven=True,  # whoever made the plan was told
        backend=plan.target.backend,
        backend_options=plan.target.backend_options,
        offload=plan.target.offload,
        split=next((graph.split.what for graph in plan.graphs if graph.split), "none"),
        solver=plan.solver.name if plan.solver.name in SOLVERS else "auto",
        accumulate=plan.resident.gradient_bytes > 0,
        in_flight=plan.target.in_flight,
        outputs=plan.model.outputs,
        regions=plan.model.regions or None,
        inputs=plan.target.inputs,
        parallel=parallel_of(plan.target.parallel),
    )


def shows_options(keywords: type[Keywords]) -> Callable[[_F], _F]:
    """Make ``help()`` and notebooks show the options that a function takes as ``**options``, one by one.

    Args:
        keywords: Which those are.
    """
    names = list(keywords.__annotations__)

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(PlanOptions(), f.name),
                annotation=f.type,
            )
            for f in fields(PlanOptions)
            if f.name in names
        ]
        shown = signature.replace(parameters=[*own, *more])
        function.__signature__ = shown  # type: ignore[attr-defined]
        if function.__doc__:
            # From Python 3.13 on the compiler takes the indentation away.
            function.__doc__ = inspect.cleandoc(function.__doc__).replace(
                "    **options: See :class:`planner.planning.options.PlanOptions`.\n", _described(names)
            )
        return function

    return decorate


def check_options(**options: Any) -> None:
    """See that options are of the kind that they are to be, before the long work.

    Args:
        options: Those of :func:`planner.plan`, ``sweep``, ``max_batch`` and ``verify``, by name.

    Raises:
        OptionError: One is not; the message says what is expected.
    """
    for name, value in options.items():
        expected = _CHECKS[name](value)
        if expected:
            shown = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
            raise OptionError(f"{name}={shown}: expected {expected}")


def _described(names: Sequence[str]) -> str:
    """The lines of :class:`PlanOptions`'s documentation on some options."""
    _, _, listed = inspect.cleandoc(PlanOptions.__doc__ or "").partition("Attributes:\n")
    lines, wanted = [], False
    for line in listed.splitlines():
        if not line.startswith(" " * 8):
            wanted = line.strip().partition(":")[0] in names
        if wanted:
            lines.append(f"{line}\n")
    return "".join(lines)


def _texts(value: Any) -> str:
    """What is expected where names, one or several, are not given."""
    if isinstance(value, str):
        return ""
    if isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        return ""
    return 'a list of names, of modules ("encoder.layer.0") or operators ("aten.native_dropout")'


def _seconds(value: Any) -> str:
    return "" if _is_number(value) and value >= 0 else "a number of seconds, 0 or more"


def _share(value: Any) -> str:
    fits = value is None or (_is_number(value) and value >= 0)
    return "" if fits else "a share of the time, as 0.33, or None"


def _at_least(least: int, most: int = 2**63 - 1) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        try:
            fits = least <= operator.index(value) <= most and not isinstance(value, bool)
        except TypeError:
            fits = False
        return "" if fits else f"a whole number, {least} or more{f', {most:,} at most' * (most < 2**63 - 1)}"

    return check


def _one_of(choice: Any) -> Callable[[Any], str]:
    # Some values that are no text, as arrays, cannot be compared with one.
    return lambda value: (
        "" if isinstance(value, str) and value in get_args(choice) else f"one of {get_args(choice)}"
    )


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else not math.isnan(value)


_CHECKS: dict[str, Callable[[Any], str]] = {
    "accumulate": lambda value: "" if value is None or isinstance(value, bool) else "True, False or None",
    "attention": lambda value: (
        "" if value is None or not _one_of(Attention)(value) else f"None or {_one_of(Attention)(value)}"
    ),
    "backend": _one_of(BackendChoice),
    "backend_options": lambda value: (
        "" if isinstance(value, Mapping) else "a dictionary of Inductor's options, as {'max_autotune': True}"
    ),
    "checkpoints": _texts,
    "effort": _one_of(Effort),
    "encodings": _one_of(Encodings),
    "in_flight": lambda value: "" if value is None else _at_least(1, MOST_IN_FLIGHT)(value),
    "keep": _texts,
    "max_overhead": _share,
    "most": _at_least(1),
    "points": _at_least(1),
    "offload": _one_of(Offload),
    "progress": lambda value: (
        "" if value is None or callable(value) else "a function of a text and a fraction"
    ),
    "recompute": _texts,
    "regions": lambda value: "" if value is None else _texts(value),
    "repeats": _at_least(0),
    "split": _one_of(SplitWhat),
    "start": _at_least(1),
    "time_limit": _seconds,
    "unproven": lambda value: "" if isinstance(value, bool) else "True or False",
}
