"""The table of what ranks write: every item once, and torch's loader takes the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.engines.base import LiveState
from mcore_rlhf.engines.fsdp.files import LiveTable, Table, live_state
from mcore_rlhf.engines.fsdp.geometry import FlatSplit, Mesh, MeshSplit, Replicated
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.storage.checksum import crc32

WORLD = 3
WEIGHT = torch.arange(20, dtype=torch.float32).reshape(5, 4)
FLAT = torch.arange(21, dtype=torch.bfloat16).reshape(7, 3)


def _table(rank: int, world: int = WORLD) -> LiveTable:
    mesh = Mesh.of((world,), range(world))
    rows = MeshSplit((5, 4), mesh, ((0, 0),), 0)
    flat = FlatSplit((7, 3), 4, 10, mesh)
    first, stop = flat.span(rank)
    table = LiveTable(Table(tuple(range(world))), rank)
    local = WEIGHT.chunk(world)[rank] if rank < len(WEIGHT.chunk(world)) else WEIGHT[:0]
    table.add(("top", "model", "w"), rows, local)
    table.add(("top", "model", "f"), flat, FLAT.flatten()[first:stop])
    table.add(("top", "model", "empty"), Replicated((0, 2), 0), torch.zeros(0, 2))
    table.add_tree(("top", "groups"), [{"lr": 1e-3, "betas": (0.9, 0.99), "step": torch.tensor(3.0)}])
    return table


def _write(state: LiveState, folder: Path) -> None:
    for file in state.files:
        path = folder / file.path
        path.parent.mkdir(exist_ok=True, parents=True)
        assert file.container is not None
        crcs = {}
        with file.container.create(path) as writer:
            for segment in file.segments:
                data = segment.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                writer.write(segment.label, 0, data)
                crcs[segment.label] = crc32(data)
            assert set(crcs) == set(writer.open_records)
            assert {key: writer.record_nbytes(key) for key in crcs} == {s.label: s.nbytes for s in file.segments}
            written = writer.finish(crcs)
        assert written.crc32 == crc32(path.read_bytes())
    for name, text in state.texts.items():
        assert callable(text)
        (folder / name).write_bytes(text())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_loads_what_the_ranks_write(tmp_path: Path) -> None:
    tables = [_table(rank) for rank in range(WORLD)]
    digests = [table.table.digest(rank) for rank, table in enumerate(tables)]
    for table in tables:
        table.table.digests = digests
        _write(live_state(table, "FSDP3"), tmp_path)
    found = {
        "top": {
            "model": {"w": torch.zeros(5, 4), "f": torch.zeros(7, 3, dtype=torch.bfloat16), "empty": torch.ones(0, 2)},
            "groups": [{"lr": 0.0, "betas": (), "step": torch.tensor(0.0)}],
        }
    }
    dcp.load(found, checkpoint_id=tmp_path / "dcp_checkpoint", no_dist=True)
    assert torch.equal(found["top"]["model"]["w"], WEIGHT)  # type: ignore[index]
    assert torch.equal(found["top"]["model"]["f"], FLAT)  # type: ignore[index]
    assert found["top"]["groups"] == [{"lr": 1e-3, "betas": (0.9, 0.99), "step": torch.tensor(3.0)}]
    names = sorted(path.name for path in (tmp_path / "dcp_checkpoint").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


def test_a_rank_that_writes_something_else_is_found_before_the_commit() -> None:
    tables = [_table(rank) for rank in range(WORLD)]
    tables[1].add(("top", "model", "more"), Replicated((2,), 1), torch.ones(2))
    tables[0].table.digests = [table.table.digest(rank) for rank, table in enumerate(tables)]
    with pytest.raises(LayoutMismatch, match="rank 1 writes other parts"):
        tables[0].table.metadata()


def test_metadata_is_made_again_only_where_something_changed() -> None:
    tables = [_table(rank).table for rank in range(WORLD)]
    tables[0].digests = [table.digest(rank) for rank, table in enumerate(tables)]
    first = tables[0].metadata()
    again = _table(0).table
    again.digests, again.made = tables[0].digests, tables[0].made
    assert again.metadata() is first
    other = _table(0)
    other.add_tree(("top", "more"), 1)
    other.table.made = tables[0].made
    other.table.digests = [other.table.digest(0), *tables[0].digests[1:]]
    assert other.table.metadata() != first
    assert len(other.table.made) == 1


def test_a_value_without_bytes_is_named() -> None:
    with pytest.raises(Unsupported, match=r"top\.rate is on the meta device"):
        _table(0).add_tree(("top",), {"rate": torch.ones(2, device="meta")})


def test_a_rank_with_nothing_has_no_file() -> None:
    table = LiveTable(Table((4, 5)), 5)
    table.add(("m", "w"), Replicated((2,), 4), torch.ones(2))
    assert live_state(table, "FSDP2").files == ()
    assert live_state(table, "FSDP2").texts == {}
    assert table.table.name(5) == "__1_0.distcp"


def test_a_tensor_of_other_ranks_is_described_all_the_same() -> None:
    table = LiveTable(Table((0, 1)), 0)
    table.add_elsewhere(("m", "w"), Replicated((2,), 1), dtype_of("float32"))
    assert table.segments == []
    assert [item.fqn for item in table.table.items(1)] == ["m.w"]
