"""Row 15: reading a ``.metadata`` of 100 MB, as torch's DCP writes it. Run as a module, it is the process that reads.

It is pickled from torch's own classes: bfloat16 matrices of 64 chunks each, with a path in ``planner_data``.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.metadata import read_metadata

from .measure import MIB, in_fresh_process, status
from .table import Row

_MEGABYTES = 100
_BYTES_PER_CHUNK = 140
_CHUNKS = 64


def row_15(folder: Path) -> Iterator[Row]:
    path = folder / "metadata"
    path.mkdir(exist_ok=True)
    in_fresh_process(__name__, "write", path)
    ours, torchs = (in_fresh_process(__name__, who, path) for who in ("ours", "torch"))
    size = f"{(path / METADATA_FILE).stat().st_size / 1e6:.0f} MB, {ours['chunks']:.0f} chunks"
    yield Row(
        15, f"read a .metadata of {size}: cpu", ours["cpu"], " s", 30, 10, f"torch's pickle {torchs['cpu']:.3g} s"
    )
    yield Row(15, "the same ÷ torch's unsafe pickle.load: cpu", ours["cpu"] / torchs["cpu"], "×", 3, 1.5)
    yield Row(
        15, "the same: memory high-water", ours["memory"], " MiB", 2048, 1024, f"torch {torchs['memory']:.0f} MiB"
    )


def _write(path: Path) -> None:
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors, places = {}, {}
    for number in range(_MEGABYTES * 10**6 // _BYTES_PER_CHUNK // _CHUNKS):
        name, chunks = f"model.layers.{number // 128}.mlp.experts.{number % 128}.weight", []
        for rank in range(_CHUNKS):
            offset = torch.Size((16 * rank, 0))
            chunks.append(m.ChunkStorageMetadata(offset, torch.Size((16, 64))))
            places[m.MetadataIndex(name, offset)] = _StorageInfo(f"__{rank}_0.distcp", number << 12, 1 << 12)
        properties = m.TensorProperties(dtype=torch.bfloat16)
        tensors[name] = m.TensorStorageMetadata(properties, torch.Size((16 * _CHUNKS, 64)), chunks)
    paths = {name: tuple(name.split(".")) for name in tensors}
    found = m.Metadata(tensors, paths, places)  # type: ignore[arg-type]
    (path / METADATA_FILE).write_bytes(pickle.dumps(found, protocol=4))


def _main(who: str, path: Path) -> None:
    chunks = 0
    if who == "torch":
        import torch.distributed.checkpoint.filesystem  # noqa: F401  # not part of what is measured
    start = time.process_time()
    if who == "write":
        _write(path)
    elif who == "torch":
        pickle.loads((path / METADATA_FILE).read_bytes())
    else:
        chunks = len(read_metadata(path).places)
    cpu, memory = time.process_time() - start, status("VmHWM") / MIB
    print(json.dumps({"cpu": cpu, "memory": memory, "chunks": chunks}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
