"""Parameters that are sharded among ranks."""

SHARDED = (
    "parameters are DTensors (fully_shard, tensor parallelism): what gathering and communicating them takes "
    "is not predicted, and the step may take more than predicted. Plan the model before it is sharded, with "
    'parallel="fsdp2:8" for 8 ranks'
)
