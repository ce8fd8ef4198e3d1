#!/usr/bin/env python
"""Train on a Ray cluster, one process per GPU.

    ray job submit --working-dir . -- python tools/launch/ray_cluster.py --gpus 16 --algorithm grpo --tp 8 ...

Each actor starts the trainer as a process of its own, so that it has a main thread, and with it signal handlers. When the
driver gets SIGTERM (``ray job stop``), it passes it on, and the run saves, commits and ends. The same line again goes on
from the newest whole checkpoint. Ray is not installed by this project, and its tests do not run this script.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_gpus=1, num_cpus=1, max_concurrency=2)  # stop() comes while train() waits
class Worker:
    """One rank."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """The address of this machine, and a port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(self, environment: dict[str, str], arguments: Sequence[str]) -> int:
        """Run the trainer; its exit code."""
        command = [sys.executable, "-m", "mcore_rlhf.demo.train", *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, **environment})  # Ray has chosen the visible GPU
        return self.process.wait()

    def stop(self) -> None:
        """Ask the trainer to save and end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def main() -> int:
    """Start all ranks, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="number of ranks")
    own, arguments = parser.parse_known_args()
    ray.init()
    group = placement_group([{"GPU": 1, "CPU": 1}] * own.gpus, strategy="PACK")
    ray.get(group.ready())
    placed = Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group))
    workers = [placed.remote() for _ in range(own.gpus)]
    running = start(workers, arguments)
    signal.signal(signal.SIGTERM, lambda *_: [worker.stop.remote() for worker in workers])
    return first_failure(workers, running)


def start(workers: Sequence[Any], arguments: Sequence[str]) -> list[Any]:
    """Give out the ranks, neighbours on the same machine, so that tensor parallelism stays within it."""
    places = ray.get([worker.place.remote() for worker in workers])
    order = sorted(range(len(workers)), key=lambda number: places[number][0])
    address, port = places[order[0]]
    world = {"WORLD_SIZE": str(len(workers)), "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [workers[number].train.remote({**world, "RANK": str(rank)}, arguments) for rank, number in enumerate(order)]


def first_failure(workers: Sequence[Any], running: list[Any]) -> int:
    """Wait for all ranks; where one fails, the others are ended, since they would wait for it."""
    while running:
        done, running = ray.wait(running)
        (code,) = ray.get(done)
        if code != 0:
            for worker in workers:
                ray.kill(worker)
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
