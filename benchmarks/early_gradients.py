"""How early gradients leave a backward, counted in matrix products; a part of ``benchmarks/ranks.py``."""

import bisect
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import planner
from benchmarks.rank_models import BLOCKS, batch, build, half_planned

FORMS = ("no plan", "a plan of the whole", "a plan with regions", "a replayed plan")
"""The ways in which each model trains."""
_REDUCES = "FSDP::post_backward_reduce"
"""How the profiler calls what ``fully_shard`` does with the gradients of a unit."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclasses.dataclass(frozen=True)
class Backward:
    """Matrix products of a backward, re-runs among them, that began before something happened.

    Attributes:
        products: All of them.
        first: Before the first gradient of a parameter was there; None under ``fully_shard``, which has
            gradients of its own.
        block: Before all gradients of the last block were there; None under ``fully_shard``.
        reduced: Before the first bucket was reduced, or the first unit of ``fully_shard``; None outside of
            these.
    """

    products: int
    first: int | None
    block: int | None
    reduced: int | None = None


def watch_backward(loss: torch.Tensor, model: torch.nn.Module, block: str) -> Backward:
    """Run a backward under the profiler.

    Args:
        loss: Of the model.
        model: Whose gradients are waited for.
        block: The last of its blocks.
    """
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: _mark(f"gradient {name}"))  # type: ignore[misc]
        for name, parameter in model.named_parameters()
    ]
    with profile(activities=[ProfilerActivity.CPU]) as session:
        loss.backward()
    for hook in hooks:
        hook.remove()
    events: Any = session.events()
    products = sorted(event.time_range.start for event in events if event.name in PRODUCTS)
    before = {event.name: bisect.bisect_left(products, event.time_range.start) for event in events}
    gradients = [count for name, count in before.items() if name.startswith("gradient ")]
    of_block = [count for name, count in before.items() if name.startswith(f"gradient {block}.")]
    reduced = [count for name, count in before.items() if name.startswith(("bucket ", _REDUCES))]
    return Backward(
        len(products),
        min(gradients, default=None),
        max(of_block, default=None),
        min(reduced, default=None),
    )


def early_gradients(
    name: str, form: str, *, wrapped: bool, sharded: bool = False, tiny: bool = False
) -> Backward:
    """The backward of a model's third step, after which buckets stay as they are.

    Args:
        name: Of the model.
        form: One of ``FORMS``.
        wrapped: Whether it trains in ``DistributedDataParallel``, with the ranks of this process's group.
        sharded: Whether ``fully_shard`` shards its blocks and the rest among them.
        tiny: Whether its layers are few and narrow.
    """
    model, inputs = build(name, tiny=tiny), batch(dist.get_rank(), tiny=tiny)
    if form != FORMS[0]:
        regions = BLOCKS[name] if form == FORMS[2] else None
        text: list[Any] = [None]
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            parallel: Any = planner.DDP(ranks) if wrapped else planner.FSDP2(ranks) if sharded else None
            backend: Any = "replay" if form == FORMS[3] else "graph"
            plan = half_planned(name, tiny=tiny, regions=regions, parallel=parallel, backend=backend)
            text = [plan.dumps()]
        dist.broadcast_object_list(text)
        planner.Plan.loads(text[0]).apply(model)
    trained: Any = model
    if wrapped:
        trained = DistributedDataParallel(model, bucket_cap_mb=0.01 if tiny else 0.5)
        trained.register_comm_hook(None, _reduced)
    where, _, _ = BLOCKS[name].rpartition(".")
    if sharded:
        for layer in model.get_submodule(where).children():
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
    last = f"{where}.{len(list(model.get_submodule(where).children())) - 1}"
    for _ in range(3):
        model.zero_grad()
        found = watch_backward(trained(**inputs).loss, model, last)
    return found


def early_rows(names: Iterable[str], forms: Sequence[str], report: Path, *, units: bool, tiny: bool) -> None:
    """What each rank does: it writes lines of the table to a file; with ``units`` those of ``fully_shard``,
    too."""
    lines = []
    for name in names:
        for form in forms:
            alone, among = (
                early_gradients(name, form, wrapped=wrapped, tiny=tiny) for wrapped in (False, True)
            )
            line = f"| {name} | {form} | {alone.products} | {alone.first} | {alone.block} "
            in_units = [early_gradients(name, form, wrapped=False, sharded=True, tiny=tiny)] if units else []
            for found in (among, *in_units):
                assert found.reduced is not None
                line += f"| {found.reduced} of {found.products} ({found.reduced / found.products:.0%}) "
            lines.append(f"{line}|")
    report.write_text(json.dumps(lines))


def _reduced(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    _mark(f"bucket {bucket.index()}")
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


def _mark(name: str) -> None:
    with record_function(name):
        pass
