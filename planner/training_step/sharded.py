"""Parameters that are sharded among ranks."""

SHARDED = (
    "parameters are DTensors (fully_shard, tensor parallelism): what gathering and communicating them takes "
    "is not predicted, and the step may take more than predicted. planner.verify() measures it"
)
