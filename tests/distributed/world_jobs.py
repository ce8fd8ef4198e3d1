"""Several worlds, each a ``torch.distributed`` world of its own, that save one step together."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.manager.run.commit import Transaction
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.manager.run.world import Worlds
from tests.distributed.jobs import engine, failing_writes, options, outcome

SIZES = {"actor": 2, "critic": 1}


def apart(folder: Path) -> str:
    """Leave the common world for one of two, which know nothing of each other; returns its name."""
    number = dist.get_rank()
    token = [secrets.token_hex(8)]
    # Whoever of an earlier job lets go of its file store last deletes it, at any time: no two have one name.
    dist.broadcast_object_list(token)
    dist.barrier()
    time.sleep(0.2)  # nobody may still be connecting to, or hearing from, a rank that leaves
    dist.destroy_process_group()
    names = [(name, rank) for name, size in SIZES.items() for rank in range(size)]
    name, rank = names[number]
    store = dist.FileStore(str(folder / f"{name}-{token[0]}.store"), SIZES[name])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZES[name], timeout=timedelta(seconds=30))
    return name


def manager(root: Path, name: str, live: Any, **more: Any) -> CheckpointManager:
    return CheckpointManager(root, {name: live}, options=options(worlds=Worlds(name, SIZES), **more))


def save_together(folder: Path) -> list[float]:
    """Steps 1 and 2 are saved; returns the random numbers that come after."""
    name = apart(folder)
    torch.manual_seed(len(name) * 10 + dist.get_rank())
    live = engine(1)
    with manager(folder / "root", name, live) as saving:
        saving.save(1, transaction="first")
        live.reset(2)
        saving.save(2, transaction="second")
        saving.wait()
    return torch.rand(2).tolist()


def load_together(folder: Path) -> dict[str, Any]:
    name = apart(folder)
    live = engine(60)
    with manager(folder / "root", name, live) as loading:
        found = loading.load()
    assert found is not None
    whole = {seed: all(torch.equal(live.values[n], v) for n, v in engine(seed).values.items()) for seed in (1, 2)}
    report = [text for _, text in found.report.lines]
    return {
        "step": found.step,
        "seed": [seed for seed in whole if whole[seed]],
        "rng": torch.rand(2).tolist(),
        "report": report,
    }


def one_rank_fails(folder: Path, victim: str) -> list[tuple[str, str]]:
    """The disk refuses what one rank writes, be it that which coordinates; the other world joins when all is over."""
    name = apart(folder)
    fails = f"{name} {dist.get_rank()}" == victim
    live, join = engine(1), Transaction.join
    told = []

    def late(transaction: Transaction) -> None:
        time.sleep(1.0 if transaction.id == "second" and not fails else 0.0)
        join(transaction)

    Transaction.join = late
    with manager(folder / "root", name, live) as saving:
        saving.save(1, transaction="first", blocking=True)
        live.reset(2)
        with failing_writes(errno.EIO, folder / "root", 1 if fails else 10**9):
            saving.save(2, transaction="second")
            told.append(outcome(saving.wait))
        live.reset(3)
        told.append(outcome(lambda: saving.save(3, transaction="third", blocking=True)))
    Transaction.join = join
    return told


def one_rank_cannot_begin(folder: Path, victim: str) -> list[tuple[tuple[str, str], float]]:
    """What one rank has cannot be saved; how long all worlds take to hear of it, and how the next save is."""
    name = apart(folder)
    live, told = engine(1), list[tuple[tuple[str, str], float]]()
    with manager(folder / "root", name, live) as saving:
        saving.save(1, transaction="first", blocking=True)
        for step, identity in ((2, "second"), (3, "third")):
            live.reset(step)
            if identity == "second" and f"{name} {dist.get_rank()}" == victim:
                time.sleep(0.5)  # the others wait for it
                live.live = lambda step: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            started = time.monotonic()
            told.append((outcome(lambda: saving.save(step, transaction=identity, blocking=True)), 0.0))  # noqa: B023
            told[-1] = told[-1][0], time.monotonic() - started
            vars(live).pop("live", None)
    return told


def come_again(folder: Path, victim: str, limit: int) -> list[tuple[str, str]]:
    """The disk of one rank refuses a step in waves; what the driver has them save next is saved, and the one before is no error."""
    name = apart(folder)
    numel = 10 << 20 if name == "actor" else 1000  # the critic's fits
    live, told, heard = engine(1, numel), list[tuple[str, str]](), list[str]()

    def hear(event: Event) -> None:
        heard.extend([event.kind] if event.kind == "retry" else [])

    more = {"max_host_memory": limit, "save_retries": 1, "on_event": hear}
    with manager(folder / "root", name, live, **more) as saving:
        for step, identity in enumerate(("first", "second", "third", "fourth", "fifth"), 1):
            live.reset(step)
            fails = step in (2, 3) and f"{name} {dist.get_rank()}" == victim
            with failing_writes(
                errno.EIO, folder / "root", 1 if fails else 10**9
            ):  # before a thread may have written all
                told.append(outcome(lambda: saving.save(step, transaction=identity)))  # noqa: B023
                saving._saver._background.ended_within(60)
        assert saving.maybe_save(6) is None
    assert heard == ["retry"], heard
    return told


def one_world_does_not_save(folder: Path, absent: str) -> tuple[str, str]:
    name = apart(folder)
    with manager(folder / "root", name, engine(1), timeout=1.0) as saving:
        calls: dict[bool, Callable[[], object]] = {
            True: saving.wait,
            False: lambda: saving.save(1, transaction="first", blocking=True),
        }
        return outcome(calls[name == absent])


def without_an_identity(folder: Path) -> tuple[str, str]:
    name = apart(folder)
    with manager(folder / "root", name, engine(1)) as saving:
        return outcome(lambda: saving.save(1))


def save_through_one_pool(folder: Path, limit: int | None, lazy: bool) -> tuple[int, int, bool]:
    """Three steps; by how much this process grew in between, how much it then holds in its pool, and whether they were saved."""
    name = apart(folder)
    numel = 24_000_000 if name == "actor" else 12_000_000
    live = engine(1, numel)
    with manager(folder / "root", name, live, max_host_memory=limit, lazy_snapshot=lazy) as saving:
        saving.reserve()
        (folder / f"{name} {dist.get_rank()} is there").touch()
        while len(list(folder.glob("* is there"))) < sum(SIZES.values()):
            time.sleep(0.01)
        Path("/proc/self/clear_refs").write_text("5")  # ``man 5 proc_pid_clear_refs``: VmHWM counts from here
        before = memory("VmRSS")
        for step in (1, 2, 3):
            saving.save(step, transaction=f"step {step}")
            saving.wait()
        grown, held = memory("VmHWM") - before, saving._saver._staging.nbytes
    with manager(folder / "root", name, fresh := engine(7, numel)) as loading:
        found = loading.load()
    return grown, held, found is not None and all(torch.equal(fresh.values[n], live.values[n]) for n in live.values)


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10
