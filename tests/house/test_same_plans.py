"""Plans of ten models are those of the last commit: a change that moves a schedule is seen.

Where it is meant, ``python -m tests.house.test_same_plans`` writes what is now, to be read as a difference.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import planner
from tests import zoo

FILE = Path(__file__).parents[1] / "data" / "same_plans.json"
MODELS = {
    "gpt": "graph",
    "resnet": "graph",
    "unet": "graph",
    "lstm": "replay",
    "nn_vae": "graph",
    "nn_transformer_encoder": "graph",
    "nn_dense_experts": "auto",
    "nn_mlp": "replay",
    "nn_densenet": "graph",
    "nn_seq2seq_attention": "replay",
}
"""By name what runs the plan."""


def _said(name: str) -> dict[str, dict[str, Any]]:
    """What plans for a GPU that is not here promise, which depends on no machine."""
    model, args, kwargs = zoo.build(name)
    found = {}
    for budget, solver in (("80%", "auto"), ("min", "sqrt_n")):  # the least by auto depends on seconds
        options: dict[str, Any] = {"loss": zoo.scalar_loss, "backend": MODELS[name], "device": "A100-80GB"}
        options["solver"] = solver
        try:
            plan = planner.plan(model, args, kwargs, budget=budget, **options)
        except planner.InfeasibleBudget as error:
            found[budget] = {"least_bytes": error.minimum_bytes}
            continue
        ran = plan.replay.model_dump() if plan.replay else [graph.recomputed for graph in plan.graphs]
        found[budget] = {
            "backend": plan.target.backend,
            "operations": plan.forward_operations,
            "recomputed": plan.recomputed_operations,
            "unplanned_bytes": plan.baseline.dynamic_peak_bytes,
            "planned_bytes": plan.predicted.dynamic_peak_bytes,
            "overhead": f"{plan.overhead:.4f}",
            "schedule": hashlib.sha256(json.dumps(ran).encode()).hexdigest()[:16],
        }
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_the_one_of_the_last_commit(name: str) -> None:
    assert _said(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        FILE.write_text(json.dumps({name: _said(name) for name in MODELS}, indent=1) + "\n")
