"""The memory that a collective takes beside its result: gloo, on the CPU, makes copies; NCCL makes none.

Collectives are not run to measure it: a rank that ran one would wait for the others. These are the copies
that PyTorch 2.13 makes; gloo's own buffers and NCCL's are outside of PyTorch's allocator.
"""

from planner._torch.fake import storage_bytes
from planner._torch.operators import is_collective
from planner._torch.tensors import call_tensors
from planner.training_step.call import Call

_COPIES_INPUT = ("reduce_scatter_tensor", "all_reduce_coalesced", "shard_dim_alltoall")
_COPIES_RESULT = ("all_gather_into_tensor",)


def copied_bytes(call: Call, kind: str) -> int:
    """The bytes that a collective holds only while it runs; 0 for other operators.

    Args:
        call: The call.
        kind: The kind of device that it runs on.
    """
    if kind != "cpu" or not is_collective(call.func):
        return 0
    name = str(call.func).partition(".")[2]
    given = sum(storage_bytes(tensor) for tensor in call_tensors(call.args[0]))
    if name.startswith(_COPIES_INPUT):
        return given
    return given * call.args[1] if name.startswith(_COPIES_RESULT) else 0
