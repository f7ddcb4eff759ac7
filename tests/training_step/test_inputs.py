"""What users pass as model, inputs and loss: read as it is meant, or an error that says what to write."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import planner
from planner.cli.builder import BuilderError, build, build_for_batches
from planner.errors import BudgetError, CaptureError
from planner.training_step.inputs import InputError, read_inputs, read_step
from planner.training_step.step import Step

pytestmark = pytest.mark.heavy

X, Y = torch.randn(6, 4), torch.randn(6, 4)


class Net(nn.Module):
    """Takes one input, and perhaps a target."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y.square().mean() if target is None else F.mse_loss(y, target)


class OfOne(nn.Module):
    """Takes one argument, whatever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(batch["x"] if isinstance(batch, dict) else batch).mean()


def _read(args: Any, kwargs: Any = None, model: nn.Module | None = None, loss: Any = None) -> Step:
    return read_step(model or Net(), args, kwargs, loss, of="plan")


def _shapes(plan: planner.Plan) -> dict[str, list[int]]:
    return {record.path: record.shape for record in plan.model.inputs}


FORMS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "a tensor": (X, (X,), {}),
    "a tuple": ((X, Y), (X, Y), {}),
    "a list": ([X, Y], (X, Y), {}),
    "a mapping": ({"x": X, "target": Y}, (), {"x": X, "target": Y}),
    "a batch of Hugging Face's": (transformers.BatchEncoding({"x": X}), (), {"x": X}),
    "nothing but keyword arguments": (None, (), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_inputs(form: str) -> None:
    inputs, args, kwargs = FORMS[form]
    step = _read(inputs, {"x": X} if inputs is None else None)
    assert len(step.args) == len(args)
    assert all(a is b for a, b in zip(step.args, args, strict=True))
    assert step.kwargs == ({"x": X} if inputs is None else kwargs)


def test_a_packed_sequence_is_one_argument_and_a_mapping_in_a_tuple_too() -> None:
    packed = pack_sequence([X])
    assert _read(packed, model=OfOne()).args[0] is packed
    assert _read(({"x": X},), model=OfOne()).args == ({"x": X},)


@pytest.mark.parametrize("entry", ["plan", "sweep", "auto_checkpoint", "verify", "max_batch"])
def test_every_entry_reads_them(entry: str) -> None:
    model = Net()
    if entry == "sweep":
        (made,) = planner.sweep(model, X, budgets="100%")
        assert _shapes(made) == {"args[0]": [6, 4]}
    elif entry == "auto_checkpoint":
        planner.auto_checkpoint(model, {"x": X}, budget="100%", solver="none")
        model(x=X).backward()
    elif entry == "verify":
        made = planner.plan(model, X, budget="100%", solver="none")
        assert planner.verify(model, X, plan=made, repeats=0).ok
    elif entry == "max_batch":
        found = planner.max_batch(model, lambda n: torch.empty(n, 4), "100kB", solver="none", most=8)
        assert _shapes(found.plan) == {"args[0]": [found.batch, 4]}
    else:
        made = planner.plan(model, transformers.BatchEncoding({"x": X}), budget="100%", solver="none")
        assert _shapes(made) == {"kwargs['x']": [6, 4]}


def test_a_loader_is_its_first_batch_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True, generator=generator)
    model = Net()
    before, own = torch.get_rng_state(), generator.get_state()
    step = _read(loader, model=model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)
    first, target = next(iter(loader))
    assert torch.equal(step.args[0], first)
    assert torch.equal(step.args[1], target)
    assert _read(DataLoader([{"x": row} for row in X], batch_size=3)).kwargs["x"].shape == (3, 4)
    odd = DataLoader([SimpleNamespace(x=X)], batch_size=None)
    assert isinstance(_read(odd, model=OfOne()).args[0], SimpleNamespace)
    with pytest.raises(InputError, match="no batch"):
        _read(DataLoader(TensorDataset(X[:0])))


class Noisy(Dataset[torch.Tensor]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.generators = [np.random.default_rng(3), random.Random(3)]

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + sum(generator.random() for generator in self.generators)


def test_neither_do_the_generators_of_its_dataset_and_of_the_sampler_of_its_batches() -> None:
    noisy, generator = Noisy(), torch.Generator().manual_seed(3)
    own = generator.get_state()
    batches = BatchSampler(RandomSampler(noisy, generator=generator), 2, drop_last=False)
    _read(DataLoader(noisy, batch_sampler=batches))
    assert torch.equal(generator.get_state(), own)
    assert torch.equal(noisy[0], Noisy()[0])


def _scalar(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: planner.plan(Net, X, budget="min"), r"class Net.*Net\(\.\.\.\)"),  # type: ignore[arg-type]
    "a function": (lambda: planner.plan(F.relu, X, budget="min"), "function.*nn.Module"),  # type: ignore[arg-type]
    "a name": (lambda: planner.plan("gpt2", X, budget="min"), "str.*nn.Module"),  # type: ignore[arg-type]
    "a module that is not ready": (
        lambda: planner.plan(nn.Linear.__new__(nn.Linear), X, budget="min"),
        r"Linear is not ready.*super\(\)\.__init__\(\)",
    ),
    "two positional": (lambda: planner.plan(Net(), X, Y, budget="min"), r"Tensor.*args=\(x, \.\.\.\)"),  # type: ignore[arg-type]
    "a number": (lambda: planner.plan(Net(), 3, budget="min"), r"int.*\(x,\)"),  # type: ignore[arg-type]
    "a generator": (lambda: planner.plan(Net(), (x for x in X), budget="min"), "generator.*DataLoader"),  # type: ignore[arg-type]
    "twice": (lambda: planner.plan(Net(), {"x": X}, {"x": X}, budget="min"), "'x' is given twice"),
    "a key": (lambda: planner.plan(Net(), {1: X}, budget="min"), r"1 is a int.*\(mapping,\)"),  # type: ignore[dict-item]
    "another name": (
        lambda: planner.plan(Net(), {"image": X}, budget="min"),
        r"mapping.*Net\.forward.*\(x, target\?\).*\(mapping,\)",
    ),
    "too many": (
        lambda: planner.plan(nn.ReLU(), (X, Y), budget="min"),
        r"ReLU\.forward.*criterion\(output, y\)",
    ),
    "a loader of pairs": (
        lambda: planner.plan(OfOne(), DataLoader(TensorDataset(X, Y)), budget="min"),
        r"first batch of the DataLoader.*\(batch\).*criterion\(output, y\)",
    ),
    "a float as loss": (lambda: planner.plan(Net(), X, budget="min", loss=0.5), "float.*lambda output"),  # type: ignore[arg-type]
    "a tuple as loss": (lambda: planner.plan(Net(), X, budget="min", loss=(1,)), "tuple.*lambda output"),  # type: ignore[arg-type]
    "a loss of two": (
        lambda: planner.plan(Net(), X, budget="min", loss=nn.CrossEntropyLoss()),
        r"CrossEntropyLoss.*\(input, target\).*lambda output",
    ),
    "a class as loss": (
        lambda: planner.plan(Net(), X, budget="min", loss=nn.MSELoss),
        "class MSELoss.*lambda",
    ),
    "sweep": (lambda: planner.sweep(Net, X), "class Net"),  # type: ignore[arg-type]
    "verify": (lambda: planner.verify(Net(), 3), "verify.*int"),  # type: ignore[arg-type]
    "a plan's path": (lambda: planner.verify(Net(), X, plan="plan.json"), r"str.*Plan\.load"),  # type: ignore[arg-type]
    "inputs for max_batch": (lambda: planner.max_batch(Net(), (X, Y), "1MiB"), "tuple.*lambda batch"),  # type: ignore[arg-type]
    "max_batch": (lambda: planner.max_batch(Net, lambda n: X, "1MiB"), "class Net"),  # type: ignore[arg-type]
    "make_args fails": (
        lambda: planner.max_batch(Net(), lambda: X, "1MiB"),  # type: ignore[arg-type,misc]
        r"make_args\(4\) raised TypeError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_other_forms_are_errors_that_say_what_to_write(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(InputError, match=words):
        call()


def test_a_plan_in_the_place_of_keyword_arguments() -> None:
    model = Net()
    made = planner.plan(model, X, budget="100%", solver="none")
    with pytest.raises(InputError, match="plan=plan"):
        planner.verify(model, X, made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "words"), [(0.6, 'write "60%"'), (8e9, "float"), (None, "NoneType"), ([1], "list")]
)
def test_budgets_of_other_kinds(budget: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        planner.plan(Net(), X, budget=budget)
    if budget is not None:
        with pytest.raises(BudgetError, match=words):
            planner.sweep(Net(), X, budgets=[budget])


def test_a_number_of_numpys_is_a_budget() -> None:
    budget = np.int64(2**30)
    assert [p.target.budget_bytes for p in planner.sweep(Net(), X, budgets=budget)] == [budget]


def test_a_sweep_over_no_budget() -> None:
    with pytest.raises(BudgetError, match="needs a budget"):
        planner.sweep(Net(), X, budgets=[])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_planning_where_gradients_are_off_names_what_turned_them_off(mode: Any) -> None:
    with mode(), pytest.raises(InputError, match=f"plan was called under torch.{mode.__name__}"):
        planner.plan(Net(), X, budget="min")


def test_a_model_that_changes_its_arguments_before_the_forward_is_not_refused() -> None:
    model = OfOne()
    model.register_forward_pre_hook(lambda _, args: args[:1])
    assert len(_read((X, Y), model=model).args) == 2


class Faulty(Net):
    """Fails in its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.layers[0](x)
        return hidden @ torch.ones(3)  # this line


def test_what_fails_names_the_line_of_the_user() -> None:
    with pytest.raises(CaptureError, match=r"test_inputs\.py:\d+ \(return hidden @ torch\.ones\(3\)"):
        planner.plan(Faulty(), X, budget="min")
    with pytest.raises(CaptureError, match=r"test_inputs\.py:\d+ .*no_such"):
        planner.plan(Net(), X, budget="min", loss=lambda output: output.no_such())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output: output.mean(), None),
        (lambda output: 3.0, "float.*scalar tensor"),
        (lambda output: (output, 1), "tuple.*scalar tensor"),
        (lambda output: output.detach().mean(), "without a gradient"),
    ],
)
def test_what_a_loss_returns(loss: Any, words: str | None) -> None:
    model = nn.Linear(4, 4)
    if words is None:
        assert planner.plan(model, X, budget="100%", solver="none", loss=loss).graphs
    else:
        with pytest.raises(CaptureError, match=words):
            planner.plan(model, X, budget="min", loss=loss)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 4), X.double()),
        (nn.Conv1d(6, 2, 1), X.bfloat16()[None]),
    ],
)
def test_a_step_that_eager_does_not_run_is_not_planned(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(CaptureError, match=r"does not run without a plan either: aten\.|step failed.*type"):
        planner.plan(model, x, budget="100%", solver="none", loss=_scalar)


def test_labels_of_another_integer_type_are_not_planned() -> None:
    model, labels = nn.Linear(4, 4), torch.zeros(6, dtype=torch.int32)
    with pytest.raises(CaptureError, match="does not run without a plan either"):
        planner.plan(model, X, budget="100%", solver="none", loss=lambda y: F.cross_entropy(y, labels))


BUILDERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
net = nn.Linear(4, 4)
def tensor(): return net, torch.randn(6, 4)
def mapping(): return net, {"input": torch.randn(6, 4)}
def loader(): return net, DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=2)
def both(): return net, (torch.randn(6, 4),), None
def wrong(): return net, "x"
def a_class(): return nn.Linear, (torch.randn(6, 4),)
def batches(): return nn.Linear, lambda n: (torch.randn(n, 4),)
"""


def _silent(_text: str, _fraction: float) -> None:
    """Report no progress."""


def test_builders_return_the_same_forms(tmp_path: Path) -> None:
    path = tmp_path / "input_forms.py"
    path.write_text(BUILDERS)
    for name, shape in {"tensor": (6, 4), "mapping": (6, 4), "loader": (2, 4), "both": (6, 4)}.items():
        built = build(f"{path}:{name}", _silent)
        (found,) = [*built.args, *built.kwargs.values()]
        assert found.shape == shape
    with pytest.raises(BuilderError, match=r"wrong.*str.*\(x,\)"):
        build(f"{path}:wrong", _silent)
    with pytest.raises(BuilderError, match="class Linear"):
        build(f"{path}:a_class", _silent)
    with pytest.raises(BuilderError, match="class Linear"):
        build_for_batches(f"{path}:batches", _silent)


def test_a_pair_of_positional_and_keyword_arguments() -> None:
    args, kwargs = read_inputs(((X,), {"target": Y}), "make_args(4)")
    assert args == (X,)
    assert kwargs == {"target": Y}
