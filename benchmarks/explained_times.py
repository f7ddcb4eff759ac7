"""Which operator explains that a plan's step takes another time than predicted."""

from collections.abc import Callable

from benchmarks.op_counts import counted
from planner.planfile.simulated import simulated
from planner.user_plan import Plan

KERNELS = {
    "native_dropout": "bernoulli",
    "draw_mask": "bernoulli",
    "random": "bernoulli",  # which large masks are drawn by
    "masked_product": "mul",
    "clone": "copy",
    "_to_copy": "copy",
    "convolution": "mkldnn_convolution",
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "embedding": "index_select",
    "mm": "mm or addmm",
    "addmm": "mm or addmm",
}
"""Operators by what the profiler, which sees those that they call, has most of their time under."""


def kernel(name: str) -> str:
    """What an operator of a plan, or of the profiler, counts as."""
    for namespace in ("aten::", "aten.", "planner::", "planner."):
        name = name.removeprefix(namespace)
    name = name.split(".")[0].removesuffix("_")
    return KERNELS.get(name, name)


def predicted(plan: Plan) -> dict[str, float]:
    """Seconds of the re-runs of each operator over those of the unplanned step, by the plan's costs."""
    step = simulated(plan)
    found: dict[str, float] = {}
    for row, again in zip(step.schedule.tolist(), step.reruns.tolist(), strict=True):
        if again:
            name = kernel(step.record(row).name)
            found[name] = found.get(name, 0.0) + step.graph.ops[row].seconds / plan.baseline.seconds
    return found


def measured(unplanned: Callable[[], object], planned: Callable[[], object]) -> dict[str, float]:
    """Seconds of each operator that the planned step takes more, over those of the unplanned step."""
    for run in (unplanned, planned):
        run()
    found: dict[str, float] = {}
    steps = [counted(run) for run in (unplanned, planned)]
    whole = sum(count.seconds for count in steps[0].values())
    for step, sign in zip(steps, (-1, 1), strict=True):
        for name, count in step.items():
            found[kernel(name)] = found.get(kernel(name), 0.0) + sign * count.seconds / whole
    return found


def explained(plan: Plan, unplanned: Callable[[], object], planned: Callable[[], object]) -> str:
    """The operators that take most more, and most less, than predicted, in points of the unplanned step."""
    expected, found = predicted(plan), measured(unplanned, planned)
    off = {name: found.get(name, 0.0) - expected.get(name, 0.0) for name in {*expected, *found}}
    most = sorted(off, key=lambda name: -abs(off[name]))[:3]
    return ", ".join(f"`{name}` {100 * off[name]:+.1f}" for name in most)
