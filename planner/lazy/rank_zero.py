"""In a job of several processes rank 0 plans, and the others take its plan.

The plan goes through the job's key-value store, not through a collective: that works with every backend and
takes no memory of the device.
"""

import json
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from planner import errors
from planner._torch import distributed
from planner.errors import InfeasibleBudget, PlanFileError, PlannerError
from planner.lazy.make import Made
from planner.planfile.fingerprint import class_name, state_digest
from planner.planfile.plan import LARGEST_FILE_BYTES, PlanRecord
from planner.planning.options import PlanOptions

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for rank 0 to plan, as long as for a collective."""
_PART_BYTES = 2**22  # the store takes 8 MiB a key


class _Counter:
    """Numbers first training calls. All ranks make them in the same order, so equal numbers are one call."""

    number = 0


def is_alone() -> bool:
    """Whether there are no other processes to plan for."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def first_rank() -> bool:
    """Whether this process plans, and reports it."""
    return is_alone() or dist.get_rank() == 0


def planned_by_rank_zero(model: torch.nn.Module, make: Callable[[], Made], options: PlanOptions) -> Made:
    """The plan that rank 0 makes; an error there is raised on every rank.

    A rank whose module differs from rank 0's, such as a stage of a pipeline, plans by itself.

    Args:
        model: The module.
        make: Makes a plan of it.
        options: The options of the plan, for ranks that only read it.

    Raises:
        PlannerError: Rank 0 could not plan, or did not answer within :data:`PATIENCE`.
    """
    if is_alone():
        return make()
    name = f"planner/first call/{_Counter.number}"
    _Counter.number += 1
    store = distributed.default_store()
    kind = f"{class_name(model)} {state_digest(model)}"
    if dist.get_rank() == 0:
        store.set(f"{name}/model", kind)
        try:
            made = make()
        except BaseException as error:
            store.set(f"{name}/answer", json.dumps(_as_json(error)))
            raise
        packed = zlib.compress(made.plan.dumps().encode())
        parts = [packed[at : at + _PART_BYTES] for at in range(0, len(packed), _PART_BYTES)]
        for number, part in enumerate(parts):
            store.set(f"{name}/part {number}", part)
        store.set(f"{name}/answer", json.dumps({"how": made.how, "parts": len(parts)}))
        return made
    try:
        store.wait([f"{name}/model"], PATIENCE)
        another = store.get(f"{name}/model").decode() != kind
        if not another:
            store.wait([f"{name}/answer"], PATIENCE)
            answer = json.loads(store.get(f"{name}/answer"))
            packed = b"".join(store.get(f"{name}/part {number}") for number in range(answer.get("parts", 0)))
    except RuntimeError as error:  # only some stores raise the more precise DistError
        raise PlannerError(
            f"rank {dist.get_rank()} waited for the plan of rank 0, which did not come: either rank 0 has "
            "ended, and its own error says why, or it does not plan at a first call as this rank does: every "
            f"rank has to call the module in training mode, in the same order ({error})"
        ) from error
    if another:
        return make()
    if "error" in answer:
        raise _raised(answer)
    text = zlib.decompressobj().decompress(packed, LARGEST_FILE_BYTES + 1)
    if len(text) > LARGEST_FILE_BYTES:
        raise PlanFileError(f"the plan of rank 0: larger than {LARGEST_FILE_BYTES} bytes")
    plan = PlanRecord.loads(text, source="the plan of rank 0")
    return Made(plan.remember(options), answer["how"])


def _as_json(error: BaseException) -> dict[str, object]:
    fields: dict[str, object] = {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, InfeasibleBudget):
        fields["bytes"] = [error.minimum_bytes, error.budget_bytes]
    return fields


def _raised(answer: dict[str, object]) -> PlannerError:
    """The error of rank 0, of the same class if that is a :class:`PlannerError`."""
    text = f"rank 0 could not plan: {answer['text']}"
    sizes = answer.get("bytes")
    if isinstance(sizes, list):
        return InfeasibleBudget(text, minimum_bytes=sizes[0], budget_bytes=sizes[1])
    kind = getattr(errors, str(answer["error"]), None)
    if isinstance(kind, type) and issubclass(kind, PlannerError):
        return kind(text)
    return PlannerError(f"rank 0 could not plan: {answer['error']}: {answer['text']}")
