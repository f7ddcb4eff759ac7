"""Values that a backward makes again on one stream of a GPU and reads on another.

The engine runs each node on the stream of its forward, and has streams wait for each other where a gradient
passes. A value that is made again passes from node to node beside the gradients.
"""

import torch


class MadeOn:
    """The streams on which values were made, by number."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def note(self, number: int, made: torch.Tensor) -> None:
        """Note that a value is made on the present stream. Nothing is noted on a CPU."""
        if made.is_cuda:
            self._streams[number] = torch.cuda.current_stream(made.device)

    def wait(self, number: int, value: torch.Tensor | None) -> None:
        """Have the present stream wait for the one that made a value, and the allocator for this reader."""
        if value is None or (made_on := self._streams.get(number)) is None:
            return
        if (here := torch.cuda.current_stream(value.device)) != made_on:
            here.wait_stream(made_on)
            value.record_stream(here)
