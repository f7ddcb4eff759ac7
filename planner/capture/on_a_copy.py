"""Running a step on a copy of the module, so that nothing of the user's is changed."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from planner._torch.autocast_state import autocast_regions, region_of_its_own
from planner._torch.compat import graphs_are_off
from planner._torch.cuda.autocast import autocast_of_cuda
from planner._torch.cuda.kernels import kernels_of_cuda
from planner._torch.distributed import tensor_parallel_ranks
from planner._torch.fake import is_fake
from planner._torch.tensors import SPARSE, is_opaque
from planner._torch.tracing.callbacks import parts_run_uncompiled
from planner._torch.tracing.hindrances import no_other_thread_traces
from planner._torch.tracing.let_go import forget_what_was_looked_up
from planner._torch.without_data.answers import Answers, answers_noted
from planner._torch.without_data.imports import imports_without_modes
from planner._torch.without_data.products import ZerosAmongFactors
from planner.blocks.running import blocks_run_as_written
from planner.capture.captured_step import CudaKernels
from planner.errors import CaptureError
from planner.heap import newer_objects
from planner.module_parts import buffers_of, parameters_of, parts_of
from planner.progress import Progress
from planner.training_step.copies import StepCopy, described, fake_copy, real_copy
from planner.training_step.left_behind import LeftBehind, left_behind, put_right
from planner.training_step.snapshot import StepSnapshot
from planner.training_step.step import Step, tensors_in

logger = logging.getLogger(__name__)


class NotWithoutDataError(CaptureError):
    """The step does not run on tensors without data; it may run on tensors with data."""


@dataclass(frozen=True)
class RunOfACopy:
    """A copy, and the original's state, which is put back when the copy's steps have run.

    Attributes:
        copied: The copy.
        before: The original's state, of which a copy may share some.
    """

    copied: StepCopy
    before: StepSnapshot

    @property
    def without_data(self) -> bool:
        return not self.copied.data


_T = TypeVar("_T")
_R = TypeVar("_R")
_Copy = Callable[[torch.nn.Module, Step], StepCopy]


@no_other_thread_traces()
def on_a_copy(
    module: torch.nn.Module,
    step: Step,
    use: Callable[[RunOfACopy], _T],
    report: Progress,
    *,
    may_have_data: bool = True,
) -> _T:
    """Call ``use`` with a copy without data; with a copy with data where the step does not run without.

    Where ``may_have_data`` is false, since another device will run the step, a copy with data runs once only
    to note the numbers that the step reads; ``use`` then gets a copy without data that is told these.

    Raises:
        CaptureError: The step runs neither way.
    """
    before = StepSnapshot.take(module, step)

    def run(copy: _Copy, use: Callable[[RunOfACopy], _R]) -> _R:
        left = LeftBehind()
        copied, result = None, None
        try:
            with newer_objects() as newer, imports_without_modes():
                try:
                    copied = copy(module, step)
                    result = use(RunOfACopy(copied, before))
                    return result
                finally:
                    forget_what_was_looked_up()
                    before.restore()
                    if copied is not None and not copied.data:
                        left = left_behind(newer, result, parts_of(copied.module))
        finally:
            if copied is not None:
                put_right(left, copied.value_of)
                copied.let_go()

    told: _Copy | None = None
    if (off := graphs_are_off()) is not None:
        # Tensors without data change with every version of PyTorch; those with data do not.
        if (wrong := _no_data(off, module, step)) is not None:
            raise wrong
        if not may_have_data:
            raise CaptureError(
                f"{off}: with others a step is recorded with its data, on the device that will run it. Plan "
                "for a device that is not here with one of these"
            )
    elif (why := _only_with_data(_given(module, step))) is not None:
        if (wrong := _no_data(why, module, step)) is not None:
            raise wrong
        if not may_have_data:
            raise _elsewhere(why)
    else:
        try:
            report("copying the module without its data", 0.0)
            result, assumed = run(fake_copy, lambda copied: (use(copied), copied.copied.assumed))
            zeros = False
            if assumed and may_have_data and _can_look(module, step):
                report("looking for zeros among the data", 0.0)
                with contextlib.suppress(CaptureError, MemoryError):  # then none are assumed
                    zeros = run(real_copy, _has_zeros)
            if not zeros:
                return result
        except NotWithoutDataError as error:
            if (wrong := _no_data(str(error), module, step)) is not None:
                raise wrong from error
            if not may_have_data:
                report("running the step with its data: they decide what runs", 0.0)
                answers = run(real_copy, _answers)
                told = partial(fake_copy, answers=answers)
    if told is not None:
        report("copying the module without its data", 0.0)
        try:
            return run(told, use)
        except NotWithoutDataError as error:  # it reads numbers that the step with data did not read
            raise _elsewhere(str(error)) from error
    report("copying the module with its data: they decide what runs", 0.0)
    return run(real_copy, use)


def as_on_its_device(cuda: CudaKernels | None, stack: contextlib.ExitStack) -> list[str]:
    """Let a copy run the kernels of its device until the contexts of ``stack`` end.

    Returns the regions of autocast around the step; the list grows while it runs.
    """
    if cuda is None:
        return autocast_regions()
    stack.enter_context(kernels_of_cuda(cuda.capability, cuda.attention, cudnn=cuda.cudnn))
    return stack.enter_context(autocast_of_cuda())


def _answers(copied: RunOfACopy) -> Answers:
    """Run a step with data and note the numbers that it reads.

    Raises:
        CaptureError: The step does not run.
    """
    copy, as_written = copied.copied, blocks_run_as_written()
    try:
        with copy.running(), region_of_its_own(), as_written, parts_run_uncompiled():
            with answers_noted() as answers:
                copy.step.run(copy.module)
            return answers
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(described("running the step with its data", error)) from error


def _can_look(module: torch.nn.Module, step: Step) -> bool:
    """Whether a step may run with data to see more of it: on the CPU, where memory is not scarce."""
    here = all(t.device.type == "cpu" for t in _given(module, step))
    return here and not _lacks_data(module, step) and tensor_parallel_ranks(module) == 1


def _has_zeros(copied: RunOfACopy) -> bool:
    """Whether a step with data multiplies zeros, so that the products' backwards run otherwise."""
    copy, as_written = copied.copied, blocks_run_as_written()
    with (
        copy.running(),
        region_of_its_own(),
        as_written,
        parts_run_uncompiled(),
        ZerosAmongFactors() as looks,
    ):
        try:
            copy.step.run(copy.module)
        except Exception:
            logger.debug("the step does not run with its data", exc_info=True)
        return bool(looks.found)


def _elsewhere(why_needed: str) -> CaptureError:
    """The error where the data are not where the step will run."""
    return CaptureError(
        f"{why_needed}. What runs depends on data, and the model or its inputs are on another device: plan "
        "it with real ones, on the device that will run it"
    )


def _no_data(why_needed: str, module: torch.nn.Module, step: Step) -> CaptureError | None:
    """The error where a step needs data and has none; None where it has."""
    if tensor_parallel_ranks(module) > 1:
        return CaptureError(
            f"{why_needed}. With data the model could be run, but it is distributed among ranks, which would "
            "have to run it together: leave the code that needs data out of the planned module"
        )
    if _lacks_data(module, step):
        return CaptureError(
            f"{why_needed}. What runs depends on data, and the model or its inputs have none (they are on "
            "the meta device): plan it with real ones"
        )
    logger.info("%s; capturing with data", why_needed)
    return None


def _only_with_data(given: Iterable[torch.Tensor]) -> str | None:
    """Why there are no tensors without data like those that are given; None where there are."""
    for tensor in given:
        if tensor.layout in SPARSE:
            return "the data of a sparse tensor decide how much memory it takes, and which operations run"
        if is_opaque(type(tensor)):
            return (
                f"{type(tensor).__name__} runs operators in its own way, and does not say by "
                "__tensor_flatten__ which tensors it holds"
            )
    return None


def _lacks_data(module: torch.nn.Module, step: Step) -> bool:
    """Whether the user's module or inputs have a tensor without data."""
    return any(t.device.type == "meta" or is_fake(t) for t in _given(module, step))


def _given(module: torch.nn.Module, step: Step) -> list[torch.Tensor]:
    """The tensors of the user's: parameters, buffers and inputs."""
    return [*parameters_of(module), *buffers_of(module), *tensors_in((step.args, dict(step.kwargs)))]
