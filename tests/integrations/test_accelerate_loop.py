"""A loop with Accelerate and the plan inside trains to the same weights, within what was predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import planner
from planner.runtime.install import installed_plan
from planner.verification.measure import measure_peak
from tests.side_by_side import no_plan_warnings
from tests.small_language_model import Example, padded, sentences, small_language_model

pytestmark = pytest.mark.timed

_UPDATES = 6
_SAVED_AFTER = 3


class _Loop:
    """Six updates of two batches each, evaluation after each; saves after the third, measures one batch."""

    def __init__(
        self, folder: Path, precision: str, planned: dict[str, Any] | None, resume: bool = False
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # there is one in a process
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        model = small_language_model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if planned is not None:
            planner.auto_checkpoint(model, budget="min", optimizer=optimizer, solver="sqrt_n", **planned)
        set_seed(1)
        batches = DataLoader(sentences(8 * _UPDATES), batch_size=4, shuffle=True, collate_fn=padded)
        self.wrapped, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        self.model, self.accelerator, self.optimizer = model, accelerator, optimizer
        self.lengths: set[int] = set()
        self.peak = 0
        self.plan = None
        if resume:
            accelerator.load_state(str(folder))
            batches = accelerator.skip_first_batches(batches, 2 * _SAVED_AFTER)
        for number, batch in enumerate(batches, 1 + 2 * _SAVED_AFTER * resume):
            self.lengths.add(batch["input_ids"].shape[1])
            self.step(batch, measured=number == 4)
            if number % 2 == 0:
                self.evaluate()
            if number == 2 * _SAVED_AFTER and not resume:
                accelerator.save_state(str(folder))
        self.batches = number

    def gradients(self, batch: Example) -> None:
        outputs = self.wrapped(**batch)
        self.accelerator.backward(outputs.loss)

    def step(self, batch: Example, measured: bool) -> None:
        with self.accelerator.accumulate(self.wrapped):
            if measured:
                self.peak = measure_peak(lambda: self.gradients(batch), "cpu").peak_bytes
                self.plan = installed_plan(self.model)
            else:
                self.gradients(batch)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.wrapped.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.wrapped.eval()
        self.wrapped(**padded(sentences(4)))
        self.wrapped.train()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("precision", "options"), [("no", {}), ("bf16", {"accumulate": True})], ids=["float32", "bfloat16"]
)
def test_it_trains_to_the_same_weights(
    precision: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with no_plan_warnings():
        ours = _Loop(tmp_path, precision, options)
        again = "planned again, as gradients are there already" in capsys.readouterr().err
        resumed = _Loop(tmp_path, precision, options, resume=True)
    assert again is not options.get("accumulate", False)
    assert len(ours.lengths) > 1
    assert ours.batches == resumed.batches == 2 * _UPDATES
    assert ours.plan is not None
    assert ours.plan.recomputed_operations
    assert ours.peak == pytest.approx(ours.plan.predicted.dynamic_peak_bytes, rel=0.005)
    # Accelerate's own: an iterator over the batches that are left draws a number after the state is loaded.
    for planned, resume in ((ours, False), (resumed, True)):
        theirs = _Loop(tmp_path / "unplanned", precision, None, resume).model.state_dict()
        found = planned.model.state_dict()
        assert list(found) == list(theirs)
        assert all(torch.equal(found[name], theirs[name]) for name in theirs)
