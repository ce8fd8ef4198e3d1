"""Rows 1, 2, 8, 10, 21 and 24 to 27: saving and loading a live model through the manager, beside torch's own ways."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.engines.base import LoadRequest, apply
from mcore_rlhf.engines.plain import FILE, TorchEngine
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.options import ManagerOptions

from .measure import MIB, Contest, Spread, flush, timed, warm
from .table import Row

_TENSORS = 16


@dataclass
class _Live:
    """A model of one size, and a manager that saves it again and again under a new number."""

    folder: Path
    module: torch.nn.Module
    fsync: bool
    step: int = 0

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    @contextmanager
    def manager(self, name: str = "run", **given: Any) -> Iterator[CheckpointManager]:
        options = ManagerOptions(fsync=self.fsync, catch_signals=False, **given)
        engine = TorchEngine(self.module, torch.optim.SGD(self.module.parameters()))
        with CheckpointManager(self.folder / name, engine, options=options) as manager:
            yield manager

    def save(self, manager: CheckpointManager, *, blocking: bool) -> None:
        self.step += 1
        manager.save(self.step, blocking=blocking)

    def forget(self) -> None:
        """Remove what was saved, so that every round begins alike."""
        for path in self.folder.glob("*/global_step_*"):
            shutil.rmtree(path)
        (self.folder / "theirs.pt").unlink(missing_ok=True)


def _live(folder: Path, gigabytes: float, *, fsync: bool, device: str = "cpu") -> _Live:
    numel = int(gigabytes * 1e9) // 4 // _TENSORS
    folder = folder / "saving"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    module = torch.nn.ParameterDict(
        {f"layer{i}": torch.nn.Parameter(torch.randn(numel, device=device)) for i in range(_TENSORS)}
    )
    return _Live(folder, module, fsync)


def row_1(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    live = _live(folder, gigabytes, fsync=False)
    theirs = live.folder / "theirs.pt"
    with live.manager() as manager:
        contest = Contest(
            {
                "ours": lambda: live.save(manager, blocking=True),
                "torch": lambda: torch.save(live.module.state_dict(), theirs),
            },
            before=live.forget,
        ).run(rounds)
        live.save(manager, blocking=True)
    saved = next((live.folder / "run").glob(f"global_step_*/actor/{FILE}"))
    subprocess.run(["unzip", "-tq", saved], check=True, capture_output=True)
    what = f"torch.save (CRC on) ÷ save of {gigabytes:g} GB, commit and manifest included"
    wall = contest.ratio("torch", "ours", "wall")
    yield Row(1, f"{what}: wall", wall.median, "×", 1.5, 2, str(wall), at_least=True)
    cpu = contest.ratio("ours", "torch", "cpu")
    yield Row(1, f"save ÷ torch.save, {gigabytes:g} GB: cpu", cpu.median, "×", 0.7, 0.6, str(cpu))
    shutil.rmtree(live.folder)


def row_2(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    live = _live(folder, gigabytes, fsync=True)
    with live.manager() as manager:
        contest = Contest(
            {"ours": lambda: live.save(manager, blocking=True), "raw": lambda: _raw(live)}, before=live.forget
        ).run(rounds)
    ratio = contest.ratio("ours", "raw", "wall")
    yield Row(2, f"save + fsync ÷ raw write + fsync, {gigabytes:g} GB: wall", ratio.median, "×", 1.15, None, str(ratio))
    shutil.rmtree(live.folder)


def _raw(live: _Live) -> None:
    """The same bytes, written in pieces of a megabyte and synced: the least that a save can cost."""
    fd = os.open(live.folder / "theirs.pt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for param in live.module.parameters():
        data = param.detach().view(torch.uint8).numpy().data
        for start in range(0, len(data), MIB):
            os.write(fd, data[start : start + MIB])
    os.fsync(fd)
    os.close(fd)


def row_8(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    live = _live(folder, gigabytes, fsync=False)
    torch.save({"model": live.module.state_dict()}, live.folder / FILE)
    flush(live.folder)
    engine, request = TorchEngine(live.module), LoadRequest(live.folder, "actor")
    warm([live.folder / FILE])

    def theirs() -> None:
        torch.load(live.folder / FILE, weights_only=True)
        gc.collect()

    contest = Contest({"torch": theirs, "ours": lambda: apply(engine.prepare_load(request))}).run(rounds)
    ratio = contest.ratio("torch", "ours", "wall")
    yield Row(
        8,
        f"torch.load ÷ load into live tensors, warm, {gigabytes:g} GB: wall",
        ratio.median,
        "×",
        2,
        4,
        str(ratio),
        True,
    )
    shutil.rmtree(live.folder)


def row_10(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    live = _live(folder, gigabytes, fsync=False)
    params = [param.detach() for param in live.module.parameters()]
    copies = [torch.zeros_like(param) for param in params]

    def memcpy() -> None:
        for copy, param in zip(copies, params, strict=True):
            copy.copy_(param)

    with live.manager() as manager:
        contest = Contest(
            {"stall": lambda: live.save(manager, blocking=False), "memcpy": memcpy},
            before=lambda: (manager.wait(), live.forget()),
        ).run(rounds)
    ratio = contest.ratio("stall", "memcpy", "wall")
    yield Row(10, f"stall of an asynchronous save ÷ memcpy, {gigabytes:g} GB", ratio.median, "×", 1.3, 1.1, str(ratio))
    theirs = _dcp_stall(live, rounds)
    ours = contest.spread("stall", "wall").median
    yield Row(10, "the same ÷ stall of torch's DCP async_save (thread)", ours / theirs, "×", 1 / 3, 1 / 6)
    shutil.rmtree(live.folder)


def row_24(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    """A step of one thread's training beside a watcher that converts what has just been saved."""
    live, threads = _live(folder, gigabytes, fsync=False), torch.get_num_threads()
    some = torch.randn(512, 512)
    root, out = live.folder / "run", live.folder / "out"
    watch = [
        sys.executable,
        "-m",
        "mcore_rlhf",
        "watch",
        root,
        "--to",
        "dcp",
        "--into",
        out,
        "--keep-last",
        "1",
        "--once",
    ]

    def steps(goes_on: Callable[[], bool]) -> float:
        """Seconds a step."""
        count, started = 0, time.perf_counter()
        while goes_on():
            for _ in range(10):
                some @ some
            count += 1
        return (time.perf_counter() - started) / count

    torch.set_num_threads(1)
    ratios: list[float] = []
    try:
        with live.manager(max_host_memory=64 * MIB) as manager:
            for _ in range(rounds + 1):
                live.save(manager, blocking=True)
                end = time.perf_counter() + 5
                alone = steps(lambda end=end: time.perf_counter() < end)  # type: ignore[misc]
                with subprocess.Popen(
                    [*map(str, watch)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ) as process:
                    beside = steps(lambda process=process: process.poll() is None)  # type: ignore[misc]
                assert process.returncode == 0
                ratios.append(beside / alone)
    finally:
        torch.set_num_threads(threads)
    spread = Spread(ratios[1:])
    what = f"a training step of one thread beside a watcher that converts {gigabytes:g} GB ÷ alone"
    yield Row(24, what, spread.median, "×", 1.05, 1.02, str(spread))
    shutil.rmtree(live.folder)


def row_25(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    """A copy behind the passes, on as many cores as these have."""
    live = _live(folder, gigabytes, fsync=False)
    params = [param.detach() for param in live.module.parameters()]
    copies = [torch.zeros_like(param) for param in params]
    some = torch.randn(1024, 1024)

    def memcpy() -> None:
        for copy, param in zip(copies, params, strict=True):
            copy.copy_(param)

    memcpy()
    passes = max(1, round(8 * timed(memcpy).wall / timed(lambda: some @ some).wall))

    def step(manager: CheckpointManager) -> float:
        """Save, go through the passes, and come to the optimizer; for how long training was kept from it."""
        saving = timed(lambda: live.save(manager, blocking=False)).wall
        for _ in range(passes):
            some @ some
        return saving + timed(manager.before_step).wall

    stalls: list[float] = []
    with live.manager("now") as now, live.manager("later", lazy_snapshot=True) as later:
        contest = Contest(
            {"memcpy": memcpy, "now": lambda: step(now), "later": lambda: stalls.append(step(later))},
            before=lambda: (now.wait(), later.wait(), live.forget()),
        ).run(rounds)
    stall = Spread([a / b.wall for a, b in zip(stalls[-rounds:], contest.samples["memcpy"], strict=True)])
    what = f"exposed stall of a lazy save, fence included, ÷ memcpy, {gigabytes:g} GB"
    yield Row(25, what, stall.median, "×", 0.1, 0.05, str(stall))
    ratio = contest.ratio("later", "now", "wall")
    what = "save, passes of eight times the memcpy, fence ÷ the same with the copy inside save: wall"
    yield Row(25, what, ratio.median, "×", 1.1, 1, str(ratio))
    shutil.rmtree(live.folder)


def row_26(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    """A save through an eighth of the memory that it copies."""
    live = _live(folder, gigabytes, fsync=True)
    eighth = live.nbytes // 8
    with live.manager("all") as unbounded, live.manager("waves", max_host_memory=eighth) as bounded:

        def save(manager: CheckpointManager) -> None:
            live.save(manager, blocking=False)
            manager.wait()

        contest = Contest({"all": lambda: save(unbounded), "waves": lambda: save(bounded)}, before=live.forget).run(
            rounds
        )
        held = bounded._saver._staging.nbytes
    ratio = contest.ratio("waves", "all", "wall")
    what = f"save + fsync through an eighth of the memory ÷ with all of it, {gigabytes:g} GB: wall"
    yield Row(26, what, ratio.median, "×", 1.5, 1.1, str(ratio))
    yield Row(26, "host memory of the copy ÷ bytes that are saved", held / live.nbytes, "×", 1 / 8)
    shutil.rmtree(live.folder)


def row_27(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    """A save beside a reference of the same size that nobody trains, written again or given a second name."""
    live = _live(folder, gigabytes / 2, fsync=True)
    frozen = TorchEngine(torch.nn.ParameterDict({name: param.detach().clone() for name, param in live.module.items()}))  # type: ignore[operator]

    @contextmanager
    def manager(name: str, **given: Any) -> Iterator[CheckpointManager]:
        options = ManagerOptions(fsync=True, catch_signals=False, **given)
        roles = {"actor": TorchEngine(live.module), "reference": frozen}
        with CheckpointManager(live.folder / name, roles, options=options) as made:
            live.save(made, blocking=True)
            yield made

    def forget() -> None:
        """All but the newest step, with which the next is compared."""
        for name in ("again", "linked"):
            for path in sorted((live.folder / name).glob("global_step_*"), key=lambda path: int(path.name[12:]))[:-1]:
                shutil.rmtree(path)
        with torch.no_grad():
            for param in live.module.parameters():
                param.add_(1)

    written: list[int] = []

    def save_linked(linked: CheckpointManager) -> None:
        live.save(linked, blocking=True)
        files = (path for path in (live.folder / "linked" / f"global_step_{live.step}").rglob("*") if path.is_file())
        written.append(sum(path.stat().st_size for path in files if path.stat().st_nlink == 1))

    with manager("again") as again, manager("linked", link_unchanged=True) as linked:
        contest = Contest(
            {"again": lambda: live.save(again, blocking=True), "linked": lambda: save_linked(linked)}, before=forget
        ).run(rounds)
    what = "bytes written ÷ bytes of the model that is trained, link_unchanged"
    yield Row(27, what, max(written) / live.nbytes, "×", 1.05, 1.01)
    ratio = contest.ratio("linked", "again", "wall")
    what = f"save + fsync with link_unchanged ÷ without, {gigabytes:g} GB of which half is as it was: wall"
    yield Row(27, what, ratio.median, "×", 1, 0.7, str(ratio))
    shutil.rmtree(live.folder)


def row_21(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    """As rows 10, 25 and 8, with the model on a GPU; nothing where there is none."""
    if not torch.cuda.is_available():
        print("row 21 needs a CUDA device")
        return
    live = _live(folder, gigabytes, fsync=False, device="cuda")
    name = f"{torch.cuda.get_device_name()}, {gigabytes:g} GB"
    params = [param.detach() for param in live.module.parameters()]
    copies = [torch.empty(param.shape, dtype=param.dtype, pin_memory=True) for param in params]

    def pinned() -> None:
        for copy, param in zip(copies, params, strict=True):
            copy.copy_(param, non_blocking=True)
        torch.cuda.synchronize()

    with live.manager() as manager:
        contest = Contest(
            {"stall": lambda: live.save(manager, blocking=False), "pinned": pinned},
            before=lambda: (manager.wait(), live.forget()),
        ).run(rounds)
    ratio = contest.ratio("stall", "pinned", "wall")
    what = f"stall of an asynchronous save ÷ copy into pinned memory, {name}"
    yield Row(21, what, ratio.median, "×", 1.3, 1.1, str(ratio))
    theirs = _dcp_stall(live, rounds)
    ours = contest.spread("stall", "wall").median
    yield Row(
        21,
        "the same ÷ stall of torch's DCP async_save (thread)",
        ours / theirs,
        "×",
        1 / 3,
        1 / 6,
        f"ours {ours:.3f} s",
    )
    yield from _behind_passes(live, pinned, name, rounds)
    torch.save({"model": live.module.state_dict()}, live.folder / FILE)
    engine, request = TorchEngine(live.module), LoadRequest(live.folder, "actor")

    def load() -> None:
        apply(engine.prepare_load(request))
        torch.cuda.synchronize()

    def torchs() -> None:
        live.module.load_state_dict(torch.load(live.folder / FILE, weights_only=True, map_location="cpu")["model"])
        torch.cuda.synchronize()

    contest = Contest({"torch": torchs, "ours": load}).run(rounds)
    ratio = contest.ratio("torch", "ours", "wall")
    yield Row(
        21,
        f"torch.load and load_state_dict ÷ load into live tensors, {name}",
        ratio.median,
        "×",
        1.5,
        2,
        str(ratio),
        True,
    )
    shutil.rmtree(live.folder)


def _behind_passes(live: _Live, pinned: Callable[[], None], name: str, rounds: int) -> Iterator[Row]:
    """Row 25 on a GPU: what a save behind eight times its copy's time of passes costs, when the GPU has come to their end."""
    some = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def product() -> None:
        some @ some
        torch.cuda.synchronize()

    product()
    passes = max(1, round(8 * timed(pinned).wall / timed(product).wall))

    def step(manager: CheckpointManager | None) -> None:
        if manager is not None:
            live.save(manager, blocking=False)
        for _ in range(passes):
            some @ some
        if manager is not None:
            manager.before_step()
        torch.cuda.synchronize()

    with live.manager("now") as now, live.manager("later", lazy_snapshot=True) as later:
        contest = Contest(
            {"pinned": pinned, "alone": lambda: step(None), "now": lambda: step(now), "later": lambda: step(later)},
            before=lambda: (now.wait(), later.wait(), live.forget()),
        ).run(rounds)
    taken = {key: [sample.wall for sample in samples] for key, samples in contest.samples.items()}
    for key, bar, aim in (("later", 0.1, 0.05), ("now", 1.3, 1.1)):
        exposed = Spread([(a - b) / c for a, b, c in zip(taken[key], taken["alone"], taken["pinned"], strict=True)])
        kind = "a lazy save, fence included," if key == "later" else "a save that copies at once"
        yield Row(
            21,
            f"exposed stall of {kind} ÷ copy into pinned memory, {name}",
            exposed.median,
            "×",
            bar,
            aim,
            str(exposed),
        )


def _dcp_stall(live: _Live, rounds: int) -> float:
    """Seconds until ``dcp.async_save`` returns, in the median; its own process group, since it wants one."""
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp

    store = live.folder / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    pending: list[object] = []

    def save() -> None:
        pending.append(dcp.async_save(live.module.state_dict(), checkpoint_id=live.folder / "dcp"))  # type: ignore[attr-defined]

    def settle() -> None:
        while pending:
            pending.pop().result()  # type: ignore[attr-defined]
        shutil.rmtree(live.folder / "dcp", ignore_errors=True)

    try:
        return Contest({"dcp": save}, before=settle).run(rounds).spread("dcp", "wall").median
    finally:
        dist.destroy_process_group()
