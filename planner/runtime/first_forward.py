"""A forward that is captured again, because its first call was not made of the plan's graphs.

The first forward of a newly built module may register hooks and build caches and parts. A plan is made of
what later forwards do. Where such a first forward breaks a graph, Dynamo would run the forward in pieces from
then on. So its capture is forgotten, and the next call is captured again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner._torch import dynamo, modules
from planner.heap import older_objects_set_aside
from planner.planfile.plan import GraphRecord, PlanRecord
from planner.training_step.step import backward_begins_at

Compiled = Callable[..., Any]
MOST_RETURNS = 8
"""How often a forward is captured again because hooks came or went; each time takes seconds."""

REPLACED = (
    "the module's forward was replaced since the plan was put in, as accelerator.prepare() does for bf16 and "
    "fp16: autocast and the conversion of outputs to float32 are inside of it then, which the plan has not "
    "seen. Of the operations that the plan re-runs the step re-runs the {} that are there, and it may exceed "
    "the budget. Plan after accelerator.prepare(...), or call planner.auto_checkpoint(...) before it"
)
_MANY_ALIKE = 8
"""If a plan has so many graphs that are alike, numbers in their code are captured for all layers at once."""


@dataclass
class OtherPaths:
    """Paths of a forward that its plan has not seen. It refers to no model, as compiled code holds it.

    Attributes:
        fitting: Structures of graphs on such paths that fit the budget by the plan's schedule.
        met: Whether a forward took such a path since somebody reset this.
        told: Whether there was a warning of a forward that was replaced.
    """

    fitting: set[str] = field(default_factory=set)
    met: bool = False
    told: bool = False


class Path:
    """The graphs that a forward was captured as, compared with the plan's.

    Args:
        plan: The plan.
        captured_again: Whether the forward is captured again where it was not made of the plan's graphs.
        others: Is told of paths that the plan has not seen.
        replaced: Returns whether the module's forward was replaced since the plan was put in.

    Attributes:
        captures: How many graphs have been captured.
    """

    def __init__(
        self,
        plan: PlanRecord,
        *,
        captured_again: bool,
        others: OtherPaths | None = None,
        replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self.captured_again, self._replaced = captured_again, replaced
        self._others = OtherPaths() if others is None else others
        self._planned = {_key(graph) for graph in plan.graphs}
        self._followed: set[tuple[str, int]] = set()
        self._strayed = self._fits = False
        alike = Counter((graph.structure, *(op.bytes for op in graph.ops)) for graph in plan.graphs)
        self._many_alike = max(alike.values(), default=0) >= _MANY_ALIKE
        self.captures = 0

    def follow(self, graph: GraphRecord) -> None:
        """Note that one of the plan's graphs was captured."""
        self.captures += 1
        self._followed.add(_key(graph))

    def note_other(self, followed: int, structure: str) -> str:
        """Note that a graph was captured that is none of the plan's.

        Args:
            followed: How many of the operations that the plan re-runs are re-run in it.
            structure: The structure of the graph.

        Returns:
            The warning to give; empty for none.
        """
        self.captures += 1
        if structure in self._others.fitting:
            self._fits = True
            return ""
        warned, self._strayed = self._strayed and self.captured_again, True
        if warned:
            return ""
        if self._replaced():
            self._others.met, told, self._others.told = not self.captured_again, self._others.told, True
            return "" if told else REPLACED.format(followed)
        if self.captured_again:
            return (
                "the forward took a path that the plan has not seen, as first forwards do that set something "
                "up: this step may exceed the budget, the next is captured again. Call the model once under "
                "torch.no_grad() before training to have the first step follow the plan too. If more or "
                "fewer tensors are among the inputs than planned, that is the reason: pass as many each time"
            )
        self._others.met = True
        return (
            "the forward took a path that the plan has not seen; of the operations that the plan re-runs it "
            f"re-runs the {followed} that are there, and it may exceed the budget. Where data decide the "
            "path, as a mask does that is set everywhere or not, plan with inputs that take the path that "
            "needs most, or apply with on_new_shape='replan'"
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured."""
        return not (self._strayed or self._fits or self._followed)

    @property
    def is_settled(self) -> bool:
        """Whether Dynamo may capture varying sizes and numbers as symbols.

        Until all of the plan's graphs are captured they are plain numbers, as when the plan was made: layers
        of the same code may have different sizes, which would become symbols. Of many graphs that are alike
        in all sizes, other numbers differ; these are captured once for all.
        """
        return not self.captured_again or self._many_alike or self.is_the_plans

    @property
    def has_strayed(self) -> bool:
        """Whether a graph was captured that is none of the plan's."""
        return self._strayed

    @property
    def is_the_plans(self) -> bool:
        """Whether the graphs are those of the plan, all of them and no others."""
        return not self._strayed and self._followed == self._planned


class CapturedAgain:
    """A compiled forward that is compiled again, once, if its first call was not made of the plan's graphs.

    It is also compiled again where a forward raised an error while it was captured: the graphs up to the
    error may have no guards that tell this forward from one that ends well, and would run in its place. And
    it is compiled again where hooks come or go after a forward left the plan: a hook that Dynamo does not
    trace ends a graph, and the graphs captured with it would fit without it too.

    Args:
        path: The graphs of that call.
        compiled: The compiled forward.
        again: Compiles this forward and its sisters again; they may be compiled once more if it is passed
            True.
        place: The place of this forward among these.
        warn: Called if nothing of the forward was captured.
    """

    def __init__(
        self,
        path: Path,
        compiled: Compiled,
        again: Callable[[bool], Sequence["CapturedAgain"]],
        place: int,
        warn: Callable[[str], None],
    ) -> None:
        self._path, self._compiled, self._again, self._place = path, compiled, again, place
        self._warn = warn
        self._run = self._first if path.captured_again else compiled
        self._hooks: tuple[int, ...] | None = None  # the hooks that were there when it left the plan
        self._returns = 0

    def __call__(self, model: torch.nn.Module, *args: Any) -> Any:
        if self._hooks is not None and self._hooks != modules.hooks_inside(model):
            self._returns += 1
            self._compile_again(once_more=False)
        before, captures = dynamo.frames_looked_at(), self._path.captures
        try:
            result = self._run(model, *args)
        except BaseException:
            if dynamo.frames_looked_at() != before:
                self._compile_again(once_more=self._path.captured_again)
            raise
        looked = dynamo.frames_looked_at() != before and self._returns < MOST_RETURNS
        if looked and (self._path.has_strayed or self._path.captures == captures):
            self._hooks = modules.hooks_inside(model)
        return result

    def _first(self, *args: Any) -> Any:
        with older_objects_set_aside():
            result = self._compiled(*args)
        if self._path.is_empty and backward_begins_at(result):
            self._warn(
                "nothing of the planned forward could be captured: the step runs without the plan. Dynamo "
                "tells why (TORCH_LOGS=graph_breaks). It leaves alone modules that FullyShardedDataParallel "
                "wraps, unless it has use_orig_params=True, and modules whose parts fully_shard shards: plan "
                "and apply to those parts"
            )
        if self._path.is_the_plans:
            self._path.captured_again, self._run = False, self._compiled
        else:
            self._compile_again(once_more=False)
        return result

    def _compile_again(self, *, once_more: bool) -> None:
        made = self._again(once_more)[self._place]
        self._path, self._compiled = made._path, made._compiled
        self._run = self._first if once_more else self._compiled
        self._hooks = None


def _key(graph: GraphRecord) -> tuple[str, int]:
    return graph.structure, graph.occurrence
