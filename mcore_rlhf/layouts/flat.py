"""The flat buffers of Megatron's distributed optimizer: where every parameter lies in ``distrib_optim.pt``.

The relation is written once: parameters in registration order go in, their places come out. Reading a checkpoint and
writing one both ask it.

Source: megatron-core 0.16.1, ``distributed/param_and_grad_buffer.py`` (``_ParamAndGradBuffer.__init__``),
``distributed/distributed_data_parallel.py``, ``optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

PARAM_ALIGNMENT = 64
"""Every parameter of a buffer starts at a multiple of that many elements; the gap before it is kept in the file."""


@dataclass(frozen=True, slots=True)
class BufferParam:
    """A parameter on its way into a buffer.

    Args:
        name: Any name; handed back.
        numel: Elements of the local parameter.
        shared_embedding: Whether it is a word embedding that two pipeline stages share; it gets a bucket of its own.
    """

    name: str
    numel: int
    shared_embedding: bool = False


@dataclass(frozen=True, slots=True)
class BufferRules:
    """What decides where buckets end.

    Args:
        bucket_size: A bucket is closed once it holds that many elements; None for a single bucket.
        divisor: A bucket's end is padded to a multiple of it; the padding is not in the file.
    """

    bucket_size: int | None
    divisor: int


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """Where a parameter lies.

    Args:
        name: As given.
        numel: As given.
        buffer_start: First element in the padded buffer in memory; equals the ``storage_offset`` in
            ``model_optim_rng.pt`` as Megatron writes it.
        file_start: First element in ``distrib_optim.pt``.
        bucket: Number of its bucket.
    """

    name: str
    numel: int
    buffer_start: int
    file_start: int
    bucket: int


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A whole buffer.

    Args:
        places: In the order in which parameters lie (reversed registration order).
        numel: Elements in memory, all padding included.
        numel_unpadded: Elements in the file.
    """

    places: tuple[FlatPlace, ...]
    numel: int
    numel_unpadded: int


def bucket_rules(
    *,
    data_parallel: int,
    high_nccl_busbw: bool,
    bucketed: bool,
    bucket_size: int | None,
    num_buckets: int | None,
    numel: int,
    default_dp: int,
) -> BufferRules:
    """The rules of one buffer.

    Args:
        data_parallel: Ranks that share the buffer (DP × CP, or the experts' own data-parallel degree).
        high_nccl_busbw: Megatron's ``ddp_pad_buckets_for_high_nccl_busbw``.
        bucketed: Whether buckets are made at all: gradients overlap with communication, and this is the first model
            chunk of the first pipeline stage.
        bucket_size: Megatron's ``ddp_bucket_size``.
        num_buckets: Megatron's ``ddp_num_buckets``; overrides ``bucket_size``.
        numel: Elements of all parameters of the rank, for ``num_buckets``.
        default_dp: DP × CP of the run, for the default size.
    """
    divisor = lcm(data_parallel, 128, 1 << 16) if high_nccl_busbw else lcm(data_parallel, 128)
    if not bucketed:
        return BufferRules(None, divisor)
    if num_buckets is not None:
        return BufferRules(numel // num_buckets, divisor)
    return BufferRules(bucket_size or max(40_000_000, 1_000_000 * default_dp), divisor)


class BufferFill(NamedTuple):
    """How far a buffer is filled.

    Args:
        start: First element behind what lies in it.
        bucket_start: That of the open bucket.
        closed_numel: Elements of the closed ones, without their padding.
        bucket: How many these are.
        is_open: Whether something lies in the open one.
    """

    start: int = 0
    bucket_start: int = 0
    closed_numel: int = 0
    bucket: int = 0
    is_open: bool = False

    @property
    def numel_unpadded(self) -> int:
        """Elements in the file, if nothing more comes."""
        return self.closed_numel + (self.start - self.bucket_start if self.is_open else 0)

    def closed(self, rules: BufferRules) -> BufferFill:
        """The same with its bucket closed."""
        end = _round_up(self.start, rules.divisor)
        return BufferFill(end, end, self.closed_numel + self.start - self.bucket_start, self.bucket + 1)

    def placing(self, param: BufferParam, rules: BufferRules) -> tuple[FlatPlace, BufferFill]:
        """Where the next parameter lies, and how far the buffer is filled with it."""
        at = self._replace(start=_round_up(self.start, PARAM_ALIGNMENT))
        if param.shared_embedding and at.is_open:
            at = at.closed(rules)
        in_file = at.closed_numel + at.start - at.bucket_start
        place = FlatPlace(param.name, param.numel, at.start, in_file, at.bucket)
        after = at._replace(start=at.start + param.numel, is_open=True)
        full = rules.bucket_size is not None and after.start - after.bucket_start >= rules.bucket_size
        return place, after.closed(rules) if full or param.shared_embedding else after


def flat_buffer(params: Sequence[BufferParam], rules: BufferRules) -> FlatBuffer:
    """Lay out one buffer: the parameters of one model chunk that have one dtype, dense or expert.

    Args:
        params: In registration order.
        rules: Where buckets end.
    """
    places, filling = list[FlatPlace](), BufferFill()
    for param in reversed(params):
        place, filling = filling.placing(param, rules)
        places.append(place)
    last = filling.closed(rules) if filling.is_open else filling
    return FlatBuffer(tuple(places), last.bucket_start, last.closed_numel)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
