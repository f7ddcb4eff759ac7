"""Ranks that train by one plan, on this machine over gloo: memory against the prediction, weights, gradients.

    python benchmarks/ranks.py --out docs/results/ranks.md
    python benchmarks/ranks.py --backend replay --ranks 2 --models llama --tiny    # a try

Each case is a Hugging Face model of six layers under ``fully_shard``, planned for half of what its step takes
over what is there throughout, and trained with AdamW beside the same model without a plan. Measured is what a
rank has: what is there (shards with their padding, the optimizer's state, buffers, inputs) and the most that
the allocator's events show over it, in forward, backward and the optimizer's step together. Plans that are
replayed (``--backend replay``) train in ``DistributedDataParallel``, too.

A thread of gloo says that a collective is done, and lets go of its buffers when it next runs, which on a busy
machine may be late. So half of the measured steps pause behind each wait for a collective, for the thread to
run; the other half do not, and how many of these took more is told.

With ``--results FOLDER`` what ranks say is kept there, and not measured again.
"""

import argparse
import functools
import gc
import json
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.early_gradients import FORMS, early_rows
from benchmarks.rank_models import BLOCKS, batch, build, half_planned
from planner.planfile.atomic_file import write_atomically
from planner.training_step.step import unique_storages
from planner.verification.measure import measure_peak
from tests.gloo import PAUSE, pauses
from tests.ranks import start_ranks, what_a_rank_says
from tests.side_by_side import counting_runs

BFLOAT16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
STEPS = 3
"""After which weights are compared."""
MEASURED = 5
"""Steps after these whose memory is measured as they are, and as many with pauses."""


BUCKET_CAP_MB = 0.5
"""Of ``DistributedDataParallel``: several buckets for these models."""
Backend = Literal["graph", "replay"]


@dataclass(frozen=True)
class Case:
    """A model, how it is trained on ranks, and what follows its plan; ``reshard`` is None for DDP."""

    model: str
    ranks: int
    reshard: bool | None
    half: bool
    tiny: bool = False
    backend: Backend = "graph"

    @property
    def dtype(self) -> str:
        return "bf16" if self.half else "fp32"

    @property
    def name(self) -> str:
        tiny, replayed = " tiny" * self.tiny, " replay" * (self.backend == "replay")
        return f"{self.model}{tiny} {self.ranks} {self.reshard} {self.dtype}{replayed}"

    @property
    def parallel(self) -> planner.FSDP2 | planner.DDP:
        if self.reshard is None:
            return planner.DDP(self.ranks, BUCKET_CAP_MB)
        return planner.FSDP2(self.ranks, self.reshard, **(BFLOAT16 if self.half else {}))

    @property
    def regions(self) -> str | None:
        return BLOCKS[self.model] if self.backend == "graph" else None

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half and self.reshard is None)

    def distributed(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as the case trains it."""
        if self.reshard is None:
            return DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
        options: dict[str, Any] = {"reshard_after_forward": self.reshard}
        if self.half:
            options["mp_policy"] = MixedPrecisionPolicy(**BFLOAT16)
        for layer in model.get_submodule(BLOCKS[self.model].removesuffix(".*")).children():
            fully_shard(layer, **options)
        return fully_shard(model, **options)


def train(case: Case, model: torch.nn.Module) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Distribute a model and train it.

    Returns:
        Bytes of each of the steps that are measured, as they are and paused, and the weights before these.
    """
    trained = case.distributed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = batch(dist.get_rank(), tiny=case.tiny)
    torch.manual_seed(dist.get_rank())

    def step() -> None:
        with case.autocast:
            loss = trained(**inputs).loss
        loss.backward()
        optimizer.step()

    def measured() -> int:
        there = _bytes([*model.parameters(), *model.buffers(), *inputs.values(), *_state(optimizer)])
        if case.reshard is None:
            there += sum(p.nbytes for p in model.parameters())  # buckets, as large as the gradients
        peak = measure_peak(step, "cpu").peak_bytes
        optimizer.zero_grad()
        return there + peak

    for _ in range(STEPS):
        step()
        optimizer.zero_grad()
    state = model.state_dict()
    weights = {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}
    gc.freeze()  # each measurement collects garbage, and would go through all that was imported
    as_they_are = [measured() for _ in range(MEASURED)]
    with pauses():
        paused = [measured() for _ in range(MEASURED)]
    return {"as they are": as_they_are, "paused": paused}, weights


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.untyped_storage().nbytes() for t in unique_storages(local))


def compare(case: Case) -> dict[str, Any]:
    """What one rank says of a case."""
    text: list[Any] = [None]
    if dist.get_rank() == 0:
        with case.autocast:
            plan = half_planned(
                case.model,
                tiny=case.tiny,
                regions=case.regions,
                parallel=case.parallel,
                backend=case.backend,
            )
        text = [plan.dumps()]
    dist.broadcast_object_list(text)
    plan = planner.Plan.loads(text[0])
    whole = plan.whole_step
    assert whole is not None
    with counting_runs() as runs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", planner.PlanWarning)
        model = plan.apply(build(case.model, tiny=case.tiny))
        planned, weights = train(case, model)
    if max(runs.backward, runs.replayed) < STEPS:
        raise RuntimeError("the plan was not followed")
    unplanned, wanted = train(case, build(case.model, tiny=case.tiny))
    return {
        "budget": plan.target.budget_bytes,
        "overhead": plan.overhead,
        "predicted": [max(plan.baseline.peak_bytes, whole.optimizer_step_bytes), whole.allocated_bytes],
        "measured": [unplanned, planned],
        "unequal": [name for name, value in wanted.items() if not torch.equal(weights[name], value)],
        "warnings": [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)],
    }


def _train_all(cases: Sequence[Case], folder: Path) -> None:
    """What ranks do."""
    warnings.simplefilter("ignore")
    for case in cases:
        try:
            said = compare(case)
        except Exception:
            said = {"failed": traceback.format_exc()}
        (folder / f"{case.name}.{dist.get_rank()}").write_text(json.dumps(said))


def _leave_early(models: Sequence[str], forms: Sequence[str], tiny: bool, name: str, folder: Path) -> None:
    """What two ranks do to see when gradients leave the backward."""
    warnings.simplefilter("ignore")
    report = folder / f"{name}.{dist.get_rank()}"
    early_rows(models, forms, report, units=FORMS[3] in forms, tiny=tiny)


def row(case: Case, said: Sequence[dict[str, Any]]) -> str:
    """A line of the table, of what all ranks say of a case."""
    how = "DDP" if case.reshard is None else f"{case.reshard}"
    if case.backend == "replay" and case.reshard is not None:
        how = f"FSDP2, reshard {how}"
    line = f"| {case.model} | {case.ranks} | {how} | {case.dtype} |"
    failed = next((rank["failed"] for rank in said if "failed" in rank), None)
    if failed is not None:
        print(failed, file=sys.stderr)
        return f"{line} failed: {failed.splitlines()[-1]} |" + " |" * 7
    late = []
    for which, predicted in enumerate(said[0]["predicted"]):
        paused = [bytes_ for rank in said for bytes_ in rank["measured"][which]["paused"]]
        off = [
            f"{count / predicted - 1:+.2%}".replace("-0.00", "+0.00") for count in (min(paused), max(paused))
        ]
        line += f" {predicted / 2**20:.2f} | {' to '.join(dict.fromkeys(off))} |"
        ranks = [rank["measured"][which] for rank in said]
        late += [
            (count - max(rank["paused"])) / predicted
            for rank in ranks
            for count in rank["as they are"]
            if count > max(rank["paused"])
        ]
    budget = said[0]["budget"]
    held = max(max(rank["measured"][1]["paused"]) for rank in said) <= budget
    unequal = sorted({name for rank in said for name in rank["unequal"]})
    warned = sorted({text for rank in said for text in rank["warnings"]})
    print(case.name, unequal, warned, file=sys.stderr)
    many = f"{len(late)} of {2 * MEASURED * len(said)}" + (f", {max(late):+.2%}" if late else "")
    return (
        f"{line} {budget / 2**20:.2f}{'' if held else ', not held'} | {said[0]['overhead']:+.1%} "
        f"| {'no' if unequal else 'yes'} | {many} |"
    )


def _heading() -> list[str]:
    return [
        "# Ranks that train by one plan",
        "",
        "Made by `python benchmarks/ranks.py --out docs/results/ranks.md`: processes on one machine, over",
        "gloo, each on one thread. The models are a Llama and a BERT of Hugging Face, with dropout in BERT,",
        "of six layers of 128 channels, with 8 sequences of 64 tokens on each rank.",
        f"torch {torch.__version__}, {platform.machine()} with {torch.backends.cpu.get_cpu_capability()}.",
        "",
    ]


_COLUMNS = (
    "dtype | unplanned, MiB | measured | planned, MiB | measured | budget, MiB | extra time | weights equal "
    "| late |"
)
_EARLY = [
    "| model | trained with | products | before the first gradient | before the last layer's "
    "| before the first bucket |",
    "|---|---|---|---|---|---|",
]


def _of_graphs(sharded: Sequence[str], early: Sequence[str]) -> list[str]:
    """What is said of plans whose regions are graphs."""
    return [
        "## FSDP2",
        "",
        "Each layer is sharded by itself, and the rest with the root. *bf16* computes in bfloat16 and",
        "reduces gradients in single precision; *reshard* is `reshard_after_forward`. The budget is what is",
        "there throughout and half of what the unplanned step takes over it. Predicted is the peak of a rank",
        "in forward, backward and the step of AdamW, with what is there throughout; beside it is how far the",
        f"measured peak is from it, in {MEASURED} steps of each rank: of the rank with the least, and, where",
        "that is another figure, of the rank with the most. Weights are compared with those of training",
        f"without a plan, bit for bit, after {STEPS} steps.",
        "",
        "A thread of gloo says that a collective is done, and lets go of its buffers when it next runs. For",
        f"that, measured steps pause for {1000 * PAUSE:.0f} ms behind each wait for a collective. *late* is",
        f"how many of {MEASURED} further steps of each rank without pauses, unplanned and planned, took",
        "more, and how much at most, of the prediction.",
        "",
        f"| model | ranks | reshard | {_COLUMNS}",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *sharded,
        "",
        "## When gradients leave the backward",
        "",
        "Counted in matrix products of the backward (`mm`, `addmm`, `bmm`), re-runs among them, by the",
        "profiler: all of them; those before the first gradient of a parameter is there; those before all",
        "gradients of the last layer are there; and, in `DistributedDataParallel` on two ranks, those before",
        "the first bucket is reduced. The plans are for half, as above. The forward of Llama is three",
        "graphs, so that a plan of the whole hands out the gradients of its head by themselves.",
        "",
        *_EARLY,
        *early,
        "",
    ]


def _of_replays(trained: Sequence[str], early: Sequence[str]) -> list[str]:
    """What is said of plans that are replayed."""
    return [
        "## Plans that are replayed",
        "",
        'The same with `backend="replay"` and without `regions=`; the rows are of a run of their own,',
        "`python benchmarks/ranks.py --backend replay`. In `DistributedDataParallel` (*DDP*), whose buckets",
        f"are of {BUCKET_CAP_MB} MB, *bf16* is autocast around the forward. It waits for its collectives",
        "where no pause can be put, so that a step may take some hundred bytes more, planned or not.",
        "",
        f"| model | ranks | in | {_COLUMNS}",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *trained,
        "",
        "When gradients leave the backward, and the first unit is reduced that `fully_shard` shards:",
        "",
        f"{_EARLY[0]} before the first unit |",
        f"{_EARLY[1]}---|",
        *early,
        "",
    ]


_SECTIONS: dict[str, tuple[Callable[..., list[str]], Sequence[str]]] = {
    "graph": (_of_graphs, FORMS[:3]),
    "replay": (_of_replays, (FORMS[0], FORMS[3])),
}
"""By backend what is said of it, and the forms of training whose gradients are watched."""


def main() -> None:
    """Train all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="how many processes")
    parser.add_argument("--backend", nargs="+", choices=_SECTIONS, default=list(_SECTIONS))
    parser.add_argument("--seconds", type=float, default=3600, help="that one number of ranks may take")
    parser.add_argument("--tiny", action="store_true", help="few narrow layers of each")
    parser.add_argument("--results", type=Path, help="keep what ranks say in this folder, and go on from it")
    parser.add_argument("--out", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    lines = _heading()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def run(work: Any, names: Sequence[str], count: int) -> list[list[Any]]:
            """What each rank says under each name; of a rank that did not come to it, how it ended."""
            if not all((folder / f"{name}.0").exists() for name in names):
                (folder / "port").unlink(missing_ok=True)
                start_ranks(work, folder, count, options.seconds)
            texts = [[what_a_rank_says(folder, name, rank) for rank in range(count)] for name in names]
            return [[json.loads(t) if t[0] in "{[" else {"failed": t} for t in said] for said in texts]

        for backend in options.backend:
            section, forms = _SECTIONS[backend]
            trained = []
            for count in options.ranks:
                cases = [
                    Case(name, count, reshard, half, options.tiny, backend)
                    for name in options.models
                    for half in (False, True)
                    for reshard in ((True, False) if backend == "graph" else (True, False, None))
                ]
                all_said = run(functools.partial(_train_all, cases), [case.name for case in cases], count)
                trained += [row(case, said) for case, said in zip(cases, all_said, strict=True)]
                print("\n".join(trained), file=sys.stderr, flush=True)
            name = " ".join(["early", *options.models, backend, "tiny" * options.tiny])
            work = functools.partial(_leave_early, options.models, forms, options.tiny, name)
            ((early, _),) = run(work, [name], 2)
            early = early["failed"].splitlines() if isinstance(early, dict) else early
            lines += section(trained, early)
    text = "\n".join(lines)
    if options.out is not None:
        write_atomically(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
