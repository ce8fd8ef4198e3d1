"""Live tensors as the sink of a plan, on the CPU."""

from __future__ import annotations

import torch

from mcore_rlhf.core.catalog import Record, dtype_of
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.plan import Copy, FilePlan
from mcore_rlhf.engines.load import LiveMemory, Unchecked

SOURCE = torch.arange(40, dtype=torch.float32)


class Bytes:
    """A file in memory."""

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        return SOURCE.view(torch.uint8).numpy().data[byte_offset : byte_offset + nbytes]

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        pass


def run(tensor: torch.Tensor, copies: list[Copy], record: Record) -> None:
    memory = LiveMemory({record.key: tensor})
    FileRun(FilePlan("live", copies), [record], Bytes(), memory, Unchecked(), window_bytes=16).run()
    memory.finish()


def stored() -> Record:
    return Record("file", "data/0", dtype_of("float32"), 40, 0)


def test_bytes_go_into_the_live_tensor_itself() -> None:
    buffer = torch.zeros(20)
    parameter = torch.nn.Parameter(buffer[4:16].view(3, 4))
    record = Record("live", "0", dtype_of("float32"), 12, 0)
    run(parameter, [Copy((12,), stored(), 10, (1,), record, 0, (1,))], record)
    assert buffer.tolist() == [0.0] * 4 + [float(i) for i in range(10, 22)] + [0.0] * 4


def test_strided_and_converted_values() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    record = Record("live", "0", dtype_of("bfloat16"), 6, 0)
    run(tensor, [Copy((2, 3), stored(), 1, (10, 2), record, 0, (3, 1))], record)
    assert tensor.tolist() == [[1.0, 3.0, 5.0], [11.0, 13.0, 15.0]]


def test_a_scalar_buffer() -> None:
    tensor = torch.tensor(0.0)
    record = Record("live", "0", dtype_of("float32"), 1, 0)
    run(tensor, [Copy((1,), stored(), 39, (1,), record, 0, (1,))], record)
    assert tensor.item() == 39.0
