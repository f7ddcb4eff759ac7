"""How long the simulated caching allocator takes for 10,000 events: the claim is 0.2 s.

python benchmarks/allocator.py [--sequences 10000]
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.settings import AllocatorSettings
from tests.allocator.test_caching_allocator import CONFS, play


def seconds(conf: str, events: int = 10_000) -> float:
    """Process seconds of a random sequence, about half of which are frees."""
    rng, live = random.Random(1), []
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    started = time.process_time()
    for _ in range(events):
        if rng.random() < 0.52 or not live:
            live.append(allocator.malloc(int(2 ** rng.uniform(4, 27))))
        else:
            allocator.free(live.pop(rng.randrange(len(live))))
    return time.process_time() - started


def main() -> None:
    """Print a line for each setting; then play many sequences, each of which must keep what always holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sequences", type=int, default=10_000, help="random sequences (10000)")
    options = parser.parse_args()
    for conf in CONFS:
        print(f"{seconds(conf):6.3f} s for 10,000 events: {conf or 'as PyTorch has it'}")
    rng = random.Random(2)
    for number in range(options.sequences):
        choices = [(rng.randrange(1000), int(2 ** rng.uniform(0, 27))) for _ in range(rng.randrange(60))]
        play(choices, CONFS[number % len(CONFS)], 300 << 20 if number % 2 else None, check=False)
    print(f"{options.sequences} random sequences kept what always holds")


if __name__ == "__main__":
    main()
