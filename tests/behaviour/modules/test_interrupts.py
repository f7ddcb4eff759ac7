"""Ctrl-C while a plan is made: a KeyboardInterrupt, always, and none inside of what PyTorch calls."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner.interrupts import held_interrupts, raise_interrupt

ROOT = Path(__file__).parents[3]


WENT_ON: list[bool] = []


class Pressed(nn.Module):
    """Presses Ctrl-C somewhere in its forward, and notes that the forward went on."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(8, 8), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            signal.raise_signal(signal.SIGINT)
        elif self.where == "weak reference":
            one = nn.Identity()
            reference = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))
            del one
            assert reference() is None
        else:
            with _Pressing():
                x = x + 1
        y = self.layer(x).square().mean()
        WENT_ON.append(True)
        return y


class _Pressing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["forward", "weak reference", "operation"])
def test_ctrl_c_is_raised_once_the_forward_is_through(where: str) -> None:
    model = Pressed(where)
    WENT_ON.clear()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        planner.plan(model, (torch.randn(4, 8),), budget="100%", solver="sqrt_n")
    assert WENT_ON == [True]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.heavy
def test_ctrl_c_while_verifying_leaves_the_model_as_it_was() -> None:
    def press(text: str, fraction: float) -> None:
        if text.startswith("measuring"):
            signal.raise_signal(signal.SIGINT)

    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),)
    plan = planner.plan(model, inputs, budget="100%", solver="sqrt_n")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        planner.verify(model, inputs, plan=plan, progress=press)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def _press(times: int, heard: list[str], stage: bool = False) -> None:
    with held_interrupts():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
            heard.append("pressed")
        if stage:
            raise_interrupt()
        heard.append("at the end")


@pytest.mark.parametrize(
    ("times", "stage", "heard"),
    [(1, False, ["pressed", "at the end"]), (1, True, ["pressed"]), (3, False, ["pressed", "pressed"])],
    ids=["at the end", "at the next stage", "at the third time"],
)
def test_it_is_raised_at_the_next_stage_or_at_the_end(times: int, stage: bool, heard: list[str]) -> None:
    happened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _press(times, happened, stage)
    assert happened == heard


def test_who_ignores_ctrl_c_or_plans_in_a_thread_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def work() -> None:
        with held_interrupts():
            raise_interrupt()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import planner
model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
args = (torch.randn(2, 4, 16),)
def planned():
    started = time.monotonic()
    try:
        planner.plan(model, args, budget="1GiB", time_limit=1)
        return time.monotonic() - started
    except KeyboardInterrupt:
        return None
planned()
whole = planned()
for share in (0.02, 0.08, 0.15, 0.25, 0.4, 0.6):
    timer = threading.Timer(share * whole, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        interrupted = planned() is None
        timer.join()
        time.sleep(0.1)
        print("late" if not interrupted else "interrupted")
    except KeyboardInterrupt:
        print("late")  # this time planning was done before
print("done")
"""


@pytest.mark.heavy
def test_a_process_lives_through_ctrl_c_at_several_moments(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-2000:]
    assert "interrupted" in done.stdout
    # But for Python's own functions, in which it may arrive in any program.
    ignored = [line for line in done.stderr.splitlines() if line.startswith("Exception ignored in")]
    assert not [line for line in ignored if "<function Weak" not in line]
