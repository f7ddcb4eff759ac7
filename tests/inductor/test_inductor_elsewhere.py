"""Programs that Inductor emits for a GPU on a machine without one."""

import pytest
import torch
from torch._dynamo import device_interface

from benchmarks.inductor_elsewhere import emitted_for
from planner.costs.devices import find_device

MIB = 1 << 20


@pytest.mark.heavy
def test_a_program_for_a_gpu_that_is_not_here_runs_without_data() -> None:
    before = device_interface.get_interface_for_device("cuda")
    program = emitted_for(find_device("H100"))
    assert "multi_processor_count=132, cc=90" in program.source
    assert program.source.count("async_compile.triton") == 3
    # At the third product: the first one and its ReLU, of 4 MiB each, the gradient of the output, of 1 MiB,
    # which lies where the output did, and the result.
    assert program.peak_bytes == (4 + 4 + 1 + 4) * MIB
    assert device_interface.get_interface_for_device("cuda") is before
    assert torch.cuda.get_device_properties.__module__ == "torch.cuda"
