"""The plan as users have it: its data, and what can be done with it."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.imports import import_without_drawing
from planner.planfile.atomic_file import write_atomically
from planner.planfile.plan import PlanRecord
from planner.report.explanation import explain
from planner.report.explanation_text import Explanation
from planner.report.figure import draw
from planner.report.page.html import page
from planner.report.small_timeline import small_timeline
from planner.report.text import as_html, as_text, render, render_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from planner.runtime.shapes.policy import OnNewShape
    from planner.training_step.step import Loss


class Plan(PlanRecord):
    """A training step within a memory budget: its schedule, and what that schedule promises."""

    @classmethod
    def of(cls, record: PlanRecord) -> "Plan":
        """The plan of a record that has been checked."""
        fields = {name: getattr(record, name) for name in cls.model_fields}
        return cls.model_construct(**fields).remember(record.made_with)

    def _repr_html_(self) -> str:
        return small_timeline(self) + as_html(render(self, chart=False))

    def summary(self) -> str:
        """What was planned, what that promises, and what it does to each module, as text of several lines.

        ``print(plan.summary())`` shows it; the command ``python -m planner show`` says the same and more.
        """
        return as_text(render_summary(self))

    def figure(self) -> "Figure":
        """Draw live bytes over the step, planned and unplanned, and what is alive at the planned peak.

        Returns:
            a figure of matplotlib's; notebooks show it, ``figure.savefig("plan.svg")`` writes it.

        Raises:
            PlottingError: matplotlib is not installed.
        """
        return draw(self)

    def explain(self, module: str = "") -> Explanation:
        """Tell what the plan does with a module, why, and what something else would take.

        ``print(plan.explain("encoder.layer.3"))`` shows what of it is kept and recomputed, when and how
        often; which moment of the step binds; what keeping all of it would take at that moment, and save; and
        what 10 % more or less budget would mean for this schedule. All bytes are simulated, as the plan's
        own are.

        Args:
            module: its name, as ``named_modules()`` has it; empty: the whole model.

        Raises:
            UnknownModule: the plan has no operation of it; names like it are given.
            PlanFileError: the plan file is of an earlier release, which did not say what operations read.
        """
        return explain(self, module)

    def report(
        self, path: str | os.PathLike[str] | None = None, *, frontier: Sequence[PlanRecord] = ()
    ) -> str:
        """Make one HTML page of the plan, which opens without a network.

        It has the timeline of live bytes, to zoom into, with what is alive at each step; the modules; all
        operations; and what the plan does in words.

        Args:
            path: the file to write, as "report.html"; None writes none.
            frontier: plans of a sweep of the same model, to show what other budgets cost.

        Returns:
            the page.

        Raises:
            PlanFileError: the file cannot be written, or the plan file is of an earlier release, which did
                not say what operations read.
            FrontierError: a plan of the frontier is of another model.
        """
        text = page(self, frontier)
        if path is not None:
            write_atomically(path, text)
        return text

    def apply(
        self,
        model: "nn.Module",
        *,
        on_new_shape: "OnNewShape" = "reapply",
        loss: "Loss | None" = None,
        arena: bool = True,
        backend_options: Mapping[str, bool | int | float | str] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> "nn.Module":
        """Make the module train by this plan, in place.

        Inputs of other shapes run by the same plan. Where no size is larger than planned they take no more
        memory; where one is, `on_new_shape` says what happens.

        Args:
            model: the module.
            on_new_shape: "reapply" warns with the peak that the same plan has at the new shape; "replan"
                makes another plan for it, within the same budget, where the same plan does not fit, and for
                a path that data lead the forward along and that the plan has not seen, before the step
                after; "error" refuses every shape but the planned one, before anything is computed.
            loss: as for `planner.plan`, to predict peaks; None for the one that the plan was made with,
                which a plan that was read from a file does not know.
            arena: whether a GPU's caching allocator is made to reserve the segments that the plan states
                (`plan.whole_step.arena`) before the first step, and again where they were given back, as by
                `torch.cuda.empty_cache()`. Without them it may reserve more: `plan.whole_step` says how much.
                With expandable segments, and on the CPU, none are reserved in any case.
            backend_options: of a plan that was read from a file, options of Inductor that it was made with
                and that decide more than which code is generated, as they were given to `planner.plan`. A
                file alone cannot set these.
            offload_folder: of a plan with `offload="disk"`, the folder of the files that it keeps results in,
                best on a fast disk; None for the folder of temporary files. Nothing of them is left behind.

        Returns:
            the same module; `planner.remove(model)` undoes it.

        Raises:
            PlanMismatch: the plan is of another model, or sets an option of Inductor that a file may not set.
            InputError: the loss is no function of the module's output.
            ValueError: `on_new_shape` is none of the three.
        """
        # A plan file is read, and shown, without PyTorch.
        import_without_drawing("planner.runtime.install")
        from planner.runtime.install import apply
        from planner.training_step.inputs import check_loss

        return apply(
            self,
            model,
            on_new_shape=on_new_shape,
            loss=check_loss(loss),
            arena=arena,
            backend_options=backend_options,
            offload_folder=offload_folder,
        )


Plan.__module__ = "planner"  # by which name it is pickled, wherever this file is
