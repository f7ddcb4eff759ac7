"""The ways to train one model, one after the other: the process that ``benchmarks/compiled.py`` starts.

Peaks are over entry, from the allocator's own events. The error of a way is the most that an element of a
gradient is off from the step in double precision from the same seed, relative to the largest element of its
parameter's gradient (of all gradients, where that is zero but for rounding, as of the bias of an attention's
keys); where dropout is on, Inductor runs with ``fallback_random`` to draw eager's numbers.
Percentages are of the peak of the step that Inductor runs without a plan, with parameters, buffers and
inputs. Seconds are processor time, of this process and of the compilers that it waited for; with ``--fresh``
unplanned Inductor and the first plan start with empty caches, and what their first step takes is told.
Steps are timed at the end, all ways in turn, so that they are compared under the same conditions. For each
ratio of ``activation_memory_budget`` whose gradients are right, a plan is made for the peak that it reached.
"""

import argparse
import copy
import json
import resource
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn as nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks.compiled import wrong
from benchmarks.compiled_models import INDUCTOR, build, with_checkpoints
from planner.verification.measure import measure_peak, time_steps

SEED = 11
OPTIONS: Any = {"fallback_random": True}
BY_RATIO = "Inductor, activation_memory_budget"
PLANNED: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "Inductor": {"backend": "inductor"},
    "Inductor's layouts": {"backend": "inductor", "backend_options": {"layout_optimization": True}},
}
"""Plans by what runs them."""
Row = dict[str, Any]


def by_ratio(ratio: float, settings: dict[str, Any]) -> Callable[..., Any]:
    """Inductor by PyTorch's own budget; each is a backend of its own, so that none runs another's code."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=ratio):
            return compile_fx(graph, inputs, config_patches=settings)

    return backend


def spent() -> float:
    """Seconds of processors, of this process and of those that it has waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def resident_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that are there before a step."""
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Ways:
    """The ways of one model.

    Args:
        name: The model's.
        repeats: How many steps are timed.
    """

    def __init__(self, name: str, repeats: int) -> None:
        self.name, self.repeats = name, repeats
        self.model, self.inputs = build(name)
        self.settings = {**OPTIONS, **INDUCTOR.get(name, {})}
        self.exact, self.exact_buffers = self._exact()
        largest = {n: float(g.abs().max()) for n, g in self.exact.items()}
        whole = max(largest.values())
        self.scales = {n: own if own > 1e-12 * whole else whole for n, own in largest.items()}
        self.buffers: dict[str, torch.Tensor] = {}
        self.state = torch.empty(0)
        self.steps: list[tuple[Row, Callable[[], object]]] = []

    def _exact(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        wide = copy.deepcopy(self.model).double()
        inputs = tuple(x.double() if x.is_floating_point() else x for x in self.inputs)
        torch.manual_seed(SEED)
        wide(*inputs).backward()
        gradients = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}
        return gradients, {n: b for n, b in wide.named_buffers() if b.is_floating_point()}

    def row(self, way: str, module: nn.Module, call: Any, **known: Any) -> Row:
        """What a way takes and computes; ``module`` has its parameters."""

        def fresh() -> Any:
            module.zero_grad(set_to_none=True)
            torch.manual_seed(SEED)
            loss = call(*self.inputs)
            loss.backward()
            return loss

        before = spent()
        fresh()
        row: Row = {"model": self.name, "way": way, **known, "first_step_seconds": spent() - before}
        gradients = {_plain(n): p.grad for n, p in module.named_parameters() if p.grad is not None}
        row["error"] = max(
            float((gradients[n] - g).abs().max()) / self.scales[n] for n, g in self.exact.items()
        )
        state, buffers = torch.get_rng_state(), {_plain(n): b.clone() for n, b in module.named_buffers()}
        row["buffers_error"] = max(
            (
                float((buffers[n] - b).abs().max() / b.abs().max().clamp(min=1e-12))
                for n, b in self.exact_buffers.items()
            ),
            default=0.0,
        )
        if way == "Inductor":
            self.buffers, self.state = buffers, state
        elif self.buffers:
            row["buffers_equal"] = all(torch.equal(b, buffers[n]) for n, b in self.buffers.items())
        if self.state.numel():
            row["generator_equal"] = torch.equal(state, self.state)
        fresh()
        module.zero_grad(set_to_none=True)
        row["peak"] = measure_peak(fresh, "cpu").peak_bytes
        module.zero_grad(set_to_none=True)
        self.steps.append((row, fresh))
        return row

    def timed(self) -> Iterator[Row]:
        """All rows again, with what a step takes."""
        taken = time_steps([step for _, step in self.steps], self.repeats)
        for (row, _), seconds in zip(self.steps, taken, strict=True):
            yield {**row, "step_seconds": statistics.median(seconds)}

    def unplanned(self, options: argparse.Namespace) -> Iterator[Row]:
        """Without a plan."""
        module = copy.deepcopy(self.model)
        yield self.row("eager", module, module)
        module = copy.deepcopy(self.model)
        with fresh_cache() if options.fresh else nullcontext():
            row = self.row("Inductor", module, torch.compile(module, options=self.settings))
        if options.fresh:
            row["compile_seconds"] = row["first_step_seconds"]
        yield row
        for ratio in options.ratios:
            module = copy.deepcopy(self.model)
            compiled = torch.compile(module, backend=by_ratio(ratio, self.settings))
            yield self.row(f"{BY_RATIO} {ratio:g}", module, compiled)
        module = copy.deepcopy(self.model)
        if options.checkpoints and with_checkpoints(module):
            yield self.row("eager, checkpoint per block", module, module)
            yield self.row(
                "Inductor, checkpoint per block", module, torch.compile(module, options=self.settings)
            )

    def planned(self, name: str, budgets: list[str], whole: int, fresh: bool) -> Iterator[Row]:
        """By plans of one of :data:`PLANNED`; the first starts with empty caches if ``fresh``."""
        resident = resident_bytes(self.model, self.inputs)
        before = spent()
        step = planner.prepare(copy.deepcopy(self.model), self.inputs, **PLANNED[name])
        wanted: dict[str, int | str] = {
            f"{name} + plan {b}" + "%" * (b != "min"): b if b == "min" else int(whole * float(b) / 100)
            for b in budgets
        }
        of_inductor = next((row for row, _ in self.steps if row["way"] == "Inductor"), None)
        for row, _ in self.steps if name == "Inductor" else []:
            if row["way"].startswith(BY_RATIO) and not wrong(row, of_inductor):
                ratio, peak = row["way"].removeprefix(BY_RATIO), row["peak"] + resident
                if peak not in wanted.values():
                    wanted[f"{name} + plan, peak of budget{ratio}"] = peak
        for number, (way, room) in enumerate(wanted.items()):
            first = number == 0 and fresh and name == "Inductor"
            known: Row = {"budget": room - resident} if isinstance(room, int) else {}
            try:
                plan = step.plan(room)
            except planner.InfeasibleBudget as error:
                least = (error.minimum_bytes or 0) - resident
                yield {"model": self.name, "way": way, "failed": f"least {least / 2**20:.2f}", **known}
                before = spent()
                continue
            known["plan_seconds"] = spent() - before
            known["predicted"] = plan.predicted.dynamic_peak_bytes
            known["recomputed"] = plan.recomputed_operations
            module = copy.deepcopy(self.model)
            plan.apply(module)
            with fresh_cache() if first else nullcontext():
                row = self.row(way, module, module, **known)
            if first:
                row["compile_seconds"] = row["first_step_seconds"]
            yield row
            before = spent()


def _plain(name: str) -> str:
    """A parameter's name without the checkpoint around its block."""
    return name.replace(".block.", ".")


def main() -> None:
    """Measure, and add rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--budgets", nargs="*", default=[])
    parser.add_argument("--ratios", nargs="*", type=float, default=[])
    for name in ("eager", "fresh", "checkpoints", "layouts", "plans-only"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not pick_vec_isa():
        raise SystemExit("Inductor finds no vector instructions: its kernels would be slower than they are")
    torch._dynamo.config.recompile_limit = 64  # all ways are compiled from the same code
    ways, whole = Ways(options.model, options.repeats), 0
    if options.plans_only:
        written = [json.loads(line) for line in options.rows.read_text().splitlines()]
        peaks = [r["peak"] for r in written if (r["model"], r["way"]) == (options.model, "Inductor")]
        whole = peaks[-1] + resident_bytes(ways.model, ways.inputs)

    def rows() -> Iterator[Row]:
        nonlocal whole
        for row in [] if options.plans_only else ways.unplanned(options):
            if row["way"] == "Inductor":
                whole = row["peak"] + resident_bytes(ways.model, ways.inputs)
            yield row
        for way in ["eager"] * options.eager + ["Inductor"] + ["Inductor's layouts"] * options.layouts:
            yield from ways.planned(way, options.budgets, whole, options.fresh)
        if options.repeats:
            yield from ways.timed()

    with warnings.catch_warnings(record=True) as caught, options.rows.open("a") as file:
        warnings.simplefilter("always", planner.PlanWarning)
        for row in rows():
            said = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
            caught.clear()
            print(row["way"], {**row, "warnings": said}, file=sys.stderr, flush=True)
            file.write(json.dumps({**row, "warnings": said}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
