"""What can be planned for which backend, seen before the long work, and what a plan file may ask of one."""

import contextlib
from collections.abc import Mapping

from planner._torch.inductor.harmless_options import decides_code_alone
from planner.choices import CUDA_GRAPHS, is_recorded
from planner.costs.devices import Device
from planner.errors import BudgetError, CompilerError, PlanMismatch, warn
from planner.parallel.strategies import FSDP2, read_parallel
from planner.planfile.budget import parse_budget
from planner.planfile.plan import PlanRecord
from planner.planning.options import OptionError, PlanOptions


def host_budget_bytes(options: PlanOptions) -> int | None:
    """The most bytes that a plan may keep on the host; None for as many as it takes.

    Raises:
        BudgetError: It is no amount of bytes.
    """
    if options.host_budget is None:
        return None
    with contextlib.suppress(BudgetError):  # which would propose percentages
        budget = parse_budget(options.host_budget, 100)
        if budget.bytes is not None and not budget.relative:
            return budget.bytes
    raise BudgetError(f"host_budget={options.host_budget!r}: expected bytes, as 64 * 2**30 or '64GiB'")


def check_offload(options: PlanOptions, device: Device) -> None:
    """See that results may be kept where the options say, for a device.

    Raises:
        OptionError: They may not.
    """
    expected = "disk" if device.kind == "cpu" else "host"
    if options.offload not in ("none", expected):
        raise OptionError(
            f"offload={options.offload!r}: expected 'none' or {expected!r} for device {device.name}"
        )


def check_unproven(options: PlanOptions, device: Device) -> None:
    """See that what has never run on a GPU is asked for on purpose.

    Raises:
        OptionError: It is not.
    """
    on_gpu = options.backend == "inductor" and device.kind == "cuda"
    if not options.unproven and (on_gpu or is_recorded(options.backend, options.backend_options)):
        asked, instead = f"backend={options.backend!r}", "plan with backend='eager'"
        if options.backend == "inductor" and not on_gpu:
            asked, instead = f"{CUDA_GRAPHS!r} in backend_options=", "leave it out"
        raise OptionError(
            f"{asked} has not been run on a GPU yet: expected unproven=True for {device.name}; pass it and "
            f"let planner.verify() compare, or {instead}"
        )
    if on_gpu and (timed := [name for name in TIMED if options.backend_options.get(name)]):
        raise OptionError(
            f"backend_options= has {timed[0]!r}: expected none of {', '.join(TIMED)} on a GPU, where timing "
            "would choose kernels whose memory a plan cannot know; leave it out"
        )


TIMED = ("max_autotune", "max_autotune_gemm", "combo_kernels", "benchmark_fusion", "triton.multi_kernel")
"""Options of Inductor by which kernels are chosen by how long they take."""


def check_backend(options: PlanOptions) -> None:
    """See that Inductor can be planned for with such options, before the long work.

    Raises:
        OptionError: An option is unknown to Inductor, given for eager, or not possible with Inductor.
    """
    if options.in_flight is not None and options.parallel is not None:
        raise OptionError("in_flight=: expected none with parallel=; a stage of a pipeline is one process's")
    if options.split != "none" and options.backend not in ("auto", "eager"):
        raise OptionError(
            f"split={options.split!r}: expected 'none' with backend={options.backend!r}; pieces are of "
            "graphs: leave backend= out"
        )
    if options.split != "none" and options.in_flight is not None:
        raise OptionError(
            f"split={options.split!r}: expected 'none' with in_flight=: pieces are for processes that run "
            "the whole step"
        )
    if options.offload != "none" and options.backend not in ("auto", "eager"):
        raise OptionError(
            f"offload={options.offload!r}: expected 'none' with backend={options.backend!r}; graphs send and "
            "fetch: leave backend= out"
        )
    if options.offload != "none" and (options.in_flight is not None or options.solver == "manual"):
        raise OptionError(
            f"offload={options.offload!r}: expected 'none' with in_flight= and solver='manual'; it is for "
            "single steps that a solver decides on"
        )
    if options.host_budget is not None:
        if options.offload == "none":
            raise OptionError("host_budget=: expected none with offload='none', which keeps nothing there")
        host_budget_bytes(options)
    if options.backend != "inductor":
        if options.backend_options:
            raise OptionError(
                f"backend_options=: expected none with backend={options.backend!r}; they are Inductor's"
            )
        alone = [name for name in ("in_flight", "parallel", "regions") if getattr(options, name) is not None]
        if options.backend == "cudagraphs" and alone:
            raise OptionError(
                f"{alone[0]}=: expected none with backend='cudagraphs': it records the graphs of a single "
                "process; leave it out, or plan with backend='eager'"
            )
        if options.backend == "replay" and options.in_flight is not None:
            raise OptionError(
                "in_flight=: expected none with backend='replay'; stages of pipelines run by backend='eager'"
            )
        sharded = isinstance(read_parallel(options.parallel), FSDP2)  # by regions
        if options.backend == "replay" and options.regions is not None and not sharded:
            raise OptionError(
                "regions=: expected none with backend='replay': gradients leave when eager's do without them"
            )
        return
    if options.in_flight is not None:
        raise OptionError(
            "in_flight=: expected none with backend='inductor'; stages of pipelines run eagerly"
        )
    if options.parallel is not None:
        raise OptionError("parallel=: expected none with backend='inductor': it is for a single process")
    if options.regions is not None and is_recorded(options.backend, options.backend_options):
        raise OptionError(
            f"regions=: expected none with {CUDA_GRAPHS!r} in backend_options=, which records a whole step; "
            "leave one of both out"
        )
    from planner._torch.inductor import compiling  # Inductor is not imported without need

    wrong = compiling.unusable_options(options.backend_options)
    if wrong is not None:
        raise OptionError(f"backend_options={dict(options.backend_options)!r}: {wrong}")


def check_compiler(options: PlanOptions, device: Device) -> None:
    """See that what Inductor emits for a device that is here can be compiled.

    Raises:
        CompilerError: There is no C++ compiler.
    """
    if options.backend != "inductor":
        return
    from planner._torch.inductor import compiling  # Inductor is not imported without need

    missing = compiling.missing_compiler()
    if missing is not None:
        raise CompilerError(f"{compiling.NO_COMPILER} ({missing})")
    unused = compiling.unused_vectors() if device.kind == "cpu" else None
    if unused is not None:
        warn(
            f"Inductor finds no vector instructions that work, though this CPU has {unused}: its programs "
            "will run several times slower, with a plan or without. It looks in a process of its own, which "
            "fails if a file beside the script is called like a module of Python's, as encodings.py: give "
            "that another name"
        )


def check_options_of_file(plan: PlanRecord, given: Mapping[str, object] | None = None) -> None:
    """See that a plan's options of Inductor are harmless, or the user's own.

    Args:
        plan: The plan. One that was made in this process remembers what the user gave.
        given: Options that the user gives again.

    Raises:
        PlanMismatch: An option is neither, is given and not the plan's, or is none of Inductor's.
    """
    target, own = plan.target, dict(given or {})
    for name, value in own.items():
        if not _is_same(target.backend_options, name, value):
            raise PlanMismatch(
                f"backend_options= has {name!r}: {value!r}, and the plan was made with "
                f"{dict(target.backend_options)!r}: give options as they are in the plan, or plan again"
            )
    if isinstance(plan.made_with, PlanOptions):
        own = {**plan.made_with.backend_options, **own}
    for name, value in target.backend_options.items():
        if not decides_code_alone(name, value) and not _is_same(own, name, value):
            raise PlanMismatch(
                f"the plan file sets Inductor's option {name!r} to {value!r:.200}. A file may only set "
                "options that decide nothing but generated code; this one is not known to be harmless: "
                "it may run programs, write files or change results. If you want it, give it again: "
                f"plan.apply(model, backend_options={{{name!r}: ...}}). Else plan without it"
            )
    if target.backend == "inductor" and target.backend_options:
        from planner._torch.inductor import compiling  # Inductor is not imported without need

        wrong = compiling.unusable_options(target.backend_options)
        if wrong is not None:
            raise PlanMismatch(f"the plan's backend_options: {wrong}; plan again")


def _is_same(options: Mapping[str, object], name: str, value: object) -> bool:
    found = options.get(name)
    return type(found) is type(value) and found == value
