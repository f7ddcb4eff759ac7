"""Two processes that train by plans for two ranks: they measure what was predicted, and compute the same."""

import copy
import gc
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.verification.measure import measure_peak
from tests.ranks import run_ranks, say_each, what_a_rank_says

HALF: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Built = tuple[nn.Module, dict[str, torch.Tensor], str]


def _words(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (8, 32), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def _llama(rank: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), _words(rank), "model.layers.*"


def _bert(rank: int) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertForMaskedLM(config).train(), _words(rank), "bert.encoder.layer.*"


CASES: dict[str, tuple[Callable[[int], Built], planner.FSDP2 | planner.DDP]] = {
    "Llama, kept gathered, in half precision": (_llama, planner.FSDP2(2, False, **HALF)),
    "in pieces: Llama": (_llama, planner.FSDP2(2)),
    # As Accelerate shards it.
    "replayed: Llama, with a group that stays gathered": (
        _llama,
        planner.FSDP2(2, None, kept_gathered=("model.norm+lm_head",)),
    ),
    "replayed: BERT, gradients in buckets": (_bert, planner.DDP(2, gradient_as_bucket_view=True)),
}


def _distributed(model: nn.Module, pattern: str, parallel: planner.FSDP2 | planner.DDP) -> nn.Module:
    if isinstance(parallel, planner.DDP):
        view = parallel.gradient_as_bucket_view
        return DistributedDataParallel(
            model, bucket_cap_mb=parallel.bucket_cap_mb, gradient_as_bucket_view=view
        )
    options: dict[str, Any] = {"reshard_after_forward": parallel.reshard_after_forward}
    if parallel.param_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(parallel.param_dtype, parallel.reduce_dtype)
    for layer in model.get_submodule(pattern.removesuffix(".*")).children():
        fully_shard(layer, **options)
    for group in parallel.kept_gathered:
        parts = [model.get_submodule(name) for name in group.split("+")]
        fully_shard(parts, **{**options, "reshard_after_forward": False})
    fully_shard(model, **options)
    return model


def _trained(
    model: nn.Module, inputs: dict[str, torch.Tensor], most: float, dropped: bool
) -> tuple[int, dict[str, torch.Tensor]]:
    """The least peak over what was there of the steps after the second, and the weights after eight steps.

    DistributedDataParallel makes its buckets anew in the second. A thread of gloo lets go of what it sent
    some time after it said that it had: a step in which it is late takes up to what was sent more. How often
    it is late is the machine's matter. So where the least of six steps is over ``most`` bytes on one of the
    ranks, both take more, up to 100: it is not late in every one of them.
    """
    gc.freeze()  # each measurement collects garbage, and would go through all that was imported
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    least = math.inf

    def step() -> object:
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        kept = None if dropped else output
        del output
        loss.backward()
        return kept

    weights = {}
    for number in range(100):
        optimizer.zero_grad()
        if number >= 2:
            least = min(least, measure_peak(step, "cpu").peak_bytes)
        else:
            step()
        optimizer.step()
        if number == 7:
            state = model.state_dict()
            weights = {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}
        if number >= 7:
            late = torch.tensor(float(least > most))
            dist.all_reduce(late)
            if not late:
                break
    return int(least), weights


def _compared(name: str) -> str:
    build, parallel = CASES[name]
    rank = dist.get_rank()
    model, inputs, pattern = build(rank)
    plain = copy.deepcopy(model)
    text: list[Any] = [None]
    in_pieces = name.startswith("in pieces")
    if rank == 0:
        kept = parallel.kept_gathered if isinstance(parallel, planner.FSDP2) else ()
        regions: Any = [pattern, *(name for group in kept for name in group.split("+"))]
        replayed = name.startswith("replayed")
        if replayed and not kept:
            regions = None
        step = planner.prepare(
            model,
            inputs,
            optimizer="adamw",
            regions=regions,
            parallel=parallel,
            backend="replay" if replayed else "graph",
            **({"split": "loss", "outputs": "dropped"} if in_pieces else {}),
        )
        solver = "auto" if in_pieces else "sqrt_n"
        text = [step.plan("min@33%", solver=solver, encodings="none").dumps()]
    dist.broadcast_object_list(text)
    plan = planner.Plan.loads(text[0])
    plain = _distributed(plain, pattern, parallel)
    whole = plan.resident.total
    predictions = {
        "planned": plan.predicted.dynamic_peak_bytes,
        "unplanned": plan.baseline.dynamic_peak_bytes,
    }
    most = {what: 1.005 * (predicted + whole) - whole for what, predicted in predictions.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", planner.PlanWarning)
        plan.apply(model)
        measured, ours = _trained(_distributed(model, pattern, parallel), inputs, most["planned"], in_pieces)
    unplanned, theirs = _trained(plain, inputs, most["unplanned"], in_pieces)
    same = partial(torch.allclose, atol=1e-4) if in_pieces else torch.equal
    said = [str(w.message) for w in caught if issubclass(w.category, planner.PlanWarning)]
    problems = [*said, *(n for n, value in theirs.items() if not same(ours[n], value))]
    for what, there in {"planned": measured, "unplanned": unplanned}.items():
        over = (there + whole) / (predictions[what] + whole) - 1
        if abs(over) > 0.005:
            problems.append(f"{what} measured {there}, predicted {predictions[what]}")
    if plan.predicted.dynamic_peak_bytes > 0.9 * plan.baseline.dynamic_peak_bytes:
        problems.append("nothing is gained")
    return "\n".join(problems) or "as predicted"


def _rank(folder: Path) -> None:
    say_each(CASES, _compared, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank says of each case; all in one pair of processes."""
    return run_ranks(_rank, tmp_path_factory, "parallel")


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_what_is_predicted_and_train_as_without_a_plan(name: str, outcomes: Path) -> None:
    for rank in range(2):
        assert what_a_rank_says(outcomes, name, rank) == "as predicted"
