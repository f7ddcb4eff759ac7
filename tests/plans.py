"""Plans made up for tests of what stores and shows them; no model is behind them."""

from planner.planfile.plan import (
    Footprint,
    GraphRecord,
    LiveModule,
    ModelRecord,
    OpRecord,
    Resident,
    SolverRecord,
    Target,
    TensorRecord,
    Timeline,
)
from planner.user_plan import Plan

MIB = 2**20
LAYER_OPS = ("norm1", "qkv", "attention.softmax", "attention.dropout", "out", "up", "gelu", "down")


def layered_plan(layers: int = 6, kept_layers: int = 2, budget_text: str = "60%") -> Plan:
    """A plan of a model of equal layers, of which the last `kept_layers` are not recomputed."""
    ops = [_op("aten.embedding.default", "model.tokens", "forward")]
    for layer in range(layers):
        for name in LAYER_OPS:
            module, _, kind = name.rpartition(".")
            path = f"model.layers.{layer}.{module or name}"
            ops.append(_op(f"aten.{kind}.default", path, "forward"))
    ops.append(_op("aten.nll_loss_forward.default", "", "forward"))
    forward_length = len(ops)
    ops += [
        _op(f"aten.{op.name.split('.')[1]}_backward.default", op.module, "backward") for op in reversed(ops)
    ]
    backward = [forward_length]
    recomputed = []
    for layer in reversed(range(layers)):
        first = 1 + layer * len(LAYER_OPS)
        rerun = list(range(first, first + len(LAYER_OPS) - 1)) if layer < layers - kept_layers else []
        recomputed += rerun
        backward += rerun
        start = forward_length + 1 + (layers - 1 - layer) * len(LAYER_OPS)
        backward += range(start, start + len(LAYER_OPS))
    backward.append(2 * forward_length - 1)
    resident = Resident(
        parameter_bytes=40 * MIB, buffer_bytes=0, input_bytes=MIB, gradient_bytes=0, optimizer_bytes=0
    )
    baseline = [2 * MIB * step for step in range(forward_length)]
    baseline += [2 * MIB * (forward_length - step) for step in range(forward_length)]
    planned = [value * 3 // 5 for value in baseline]
    budget_bytes = None if budget_text == "min" else max(planned) + resident.total + MIB
    return Plan(
        created_with={"planner": "0.1.0", "torch": "2.13.0"},
        coverage="one-graph",
        model=ModelRecord(
            class_name="zoo.GPT",
            training=True,
            inputs=[
                TensorRecord(
                    path="args[0]", shape=[8, 128], dtype="torch.int64", device="cpu", requires_grad=False
                )
            ],
            parameter_count=10 * MIB,
            state_digest="0123456789abcdef" * 4,
            autocast=[],
            torch_version="2.13.0",
        ),
        target=Target(
            budget_bytes=budget_bytes,
            budget_text=budget_text,
            device="cpu",
            costs="roofline of cpu",
            workspace="measured",
        ),
        solver=SolverRecord(
            name="sqrt_n",
            status="feasible",
            gap=None,
            bound_seconds=None,
            solve_seconds=0.2,
            capture_seconds=1.5,
        ),
        resident=resident,
        predicted=_footprint(resident, max(planned), 1.1),
        baseline=_footprint(resident, max(baseline), 1.0),
        no_recompute=_footprint(resident, max(baseline) - MIB, 1.0),
        graphs=[
            GraphRecord(
                fingerprint="f" * 64,
                structure="5" * 64,
                unused_outputs=[],
                ops=ops,
                backward=backward,
                kept=[index for index in range(forward_length) if index not in recomputed],
            )
        ],
        timeline=Timeline.downsample(planned, forward_length),
        baseline_timeline=Timeline.downsample(baseline, forward_length),
        peak_holders=[LiveModule(module=f"model.layers.{n}", bytes=(n + 1) * MIB) for n in range(layers)],
        notes=[],
    )


def _op(name: str, module: str, phase: str) -> OpRecord:
    return OpRecord(name=name, module=module, bytes=MIB, phase=phase, seconds=0.001)  # type: ignore[arg-type]


def _footprint(resident: Resident, dynamic_bytes: int, seconds: float) -> Footprint:
    return Footprint(
        peak_bytes=resident.total + dynamic_bytes,
        dynamic_peak_bytes=dynamic_bytes,
        resident_bytes=resident.total,
        seconds=seconds,
    )
