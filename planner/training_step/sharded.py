"""Parameters that are sharded among ranks."""

SHARDED = (
    "parameters are DTensors that fully_shard made: what gathering and reducing them takes is not predicted, "
    "and the step may take more than predicted. Plan the model before it is sharded, with "
    'parallel="fsdp2:8" for 8 ranks'
)
