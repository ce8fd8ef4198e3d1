"""One rank of Megatron-core on a GPU, without stand-ins: ``torchrun … -m tests.gpu.megatron_job JOB FOLDER``, what it saw as JSON.

Jobs: ``lazy`` (a mixture with a bias in its router: a copy behind training, at its latest, beside a blocking save); ``offloaded`` and
``half`` (an optimizer whose states are on the CPU, all and half of them: saved, loaded, and converted).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference import engine_jobs, muon_jobs
from tests.reference.observing import LOOK, Session

MIXTURE = TinyGPT(vocab_size=190, num_experts=4, moe_router_enable_expert_bias=True)
DENSE = TinyGPT(vocab_size=190)


def lazy(root: Path) -> dict[str, Any]:
    return {"wrong": engine_jobs.save_lazily(Session(MIXTURE, Parallel(), Training()), str(root))}


def offloaded(root: Path, kind: str) -> dict[str, Any]:
    """A run of our engine's, and one that loads it; without Transformer Engine and apex Megatron's own load refuses any fresh optimizer."""
    session = Session(DENSE, Parallel(), Training())
    saved = muon_jobs.save(session, str(root / "run"), kind)
    loaded = muon_jobs.load(session, str(root / "run"), kind)
    report = convert(
        root / f"run/global_step_{LOOK}/actor", root / "dist", ConvertOptions("megatron-dist", fsync=False)
    )
    states = saved.states[LOOK].items()
    return {
        "losses": [saved.losses, loaded.losses], "lossless": report.lossless, "said": saved.said, "report": loaded.report,
        "differs": differing(saved.states[LOOK], loaded.states[LOOK]),
        "moved": sorted({str(tensor.device.type) for name, tensor in states if name.endswith("exp_avg")}),
    }  # fmt: skip


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in sorted({*one, *two}) if key not in one or key not in two or not torch.equal(one[key], two[key])]  # fmt: skip


def main(job: str, root: Path) -> None:
    torch.cuda.set_device(0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl")
    kinds = {"offloaded": muon_jobs.OFFLOAD, "half": muon_jobs.OFFLOAD + ", half"}
    found = lazy(root) if job == "lazy" else offloaded(root, kinds[job])
    (root / f"{job}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
