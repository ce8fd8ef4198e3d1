"""Reading ``distrib_optim.pt``: one file alone does not say where a parameter lies, so two ways must agree.

The places are computed from registration order and args; where the model file still has its parameters as views of one
flat buffer, their storage offsets must be the same places. That the values agree is checked when they are read.

Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``,
``load_parameter_state_from_dp_zero_legacy`` for files from before February 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.megatron.buffers import LocalBuffer, LocalParam, Member
from mcore_rlhf.layouts.flat import Place
from mcore_rlhf.storage.ptfile import StoredTensor

States = dict[str, StoredTensor]
Layout = Callable[[Sequence[LocalParam]], list[LocalBuffer]]


def member_contents(tree: object, file: str, chained: tuple[Member, ...]) -> list[Mapping[object, object] | None]:
    """What the file has for each chained optimizer; None where another rank's file has it.

    Raises:
        Unsupported: The file is not built like a distributed optimizer's.
    """
    contents: list[Mapping[object, object] | None] = tree if isinstance(tree, list) else [tree]  # type: ignore[list-item]
    if len(contents) != len(chained):
        raise Unsupported(f"{file}: expected the state of {len(chained)} chained optimizers, found {len(contents)}")
    for content in contents:
        if content is not None and not isinstance(content, dict):
            raise Unsupported(f"{file}: expected dictionaries of buffers, found {type(content).__name__}")
    return contents


def flat_states(
    content: Mapping[object, object],
    file: str,
    params: Sequence[LocalParam],
    stored: Mapping[tuple[int, str], StoredTensor],
    layout: Layout,
) -> dict[tuple[int, str], States]:
    """Where the states of one member's parameters lie.

    Args:
        content: The member's part of the file.
        file: The file, for messages.
        params: The member's trainable parameters on this rank, in registration order.
        stored: Where each parameter itself lies, by (chunk, name).
        layout: Lays out parameters in buffers.

    Returns:
        By (chunk, name): state name → where it lies.

    Raises:
        LayoutMismatch: The sizes, or the storage offsets, contradict the computed places.
    """
    candidates = [params, _views_of_buffers(params, stored)]
    reason = ""
    for candidate in candidates:
        buffers = layout(candidate)
        reason = _contradiction(buffers, content, stored)
        if not reason:
            return _located(buffers, content, candidate, file)
    raise LayoutMismatch(
        f"{file}: {reason}\nThe bucket or padding options in args may not be those of the run, or some parameters were "
        "frozen: mark those with 'trainable: false' in --rules."
    )


def _views_of_buffers(params: Sequence[LocalParam], stored: Mapping[tuple[int, str], StoredTensor]) -> list[LocalParam]:
    """Only the parameters that are views of a storage larger than themselves: frozen ones are not in any buffer."""
    return [p for p in params if stored[p.vpp_rank, p.name].record.numel > p.numel]


def _contradiction(
    buffers: Sequence[LocalBuffer], content: Mapping[object, object], stored: Mapping[tuple[int, str], StoredTensor]
) -> str:
    """What the file, or the model file's storage offsets, say against a layout; empty when nothing."""
    indices = [key for key in content if isinstance(key, int)]
    if len(indices) != len(buffers):
        return f"{len(indices)} buffers stored, {len(buffers)} expected"
    for index, buffer in enumerate(buffers):
        states = _buffer_states(content, index)
        found = {name: sum(t.shape[0] for t in tensors) for name, tensors in states.items()}
        wrong = {name: numel for name, numel in found.items() if numel != buffer.flat.numel_unpadded}
        if wrong or not found:
            return (
                f"buffer {index} should have {buffer.flat.numel_unpadded} elements, computed from the model's parameters; "
                f"found {wrong or 'none'}"
            )
        if moved := _moved(buffer, stored):
            return f"buffer {index}: {moved}"
    return ""


def _moved(buffer: LocalBuffer, stored: Mapping[tuple[int, str], StoredTensor]) -> str:
    """A parameter whose storage offset in the model file is not its computed place, where the file still has views."""
    for place in buffer.flat.places:
        tensor = stored[buffer.vpp_rank, place.name]
        is_view = tensor.record.numel == buffer.flat.numel
        if is_view and tensor.start != place.buffer_start:
            return f"{place.name} is at {tensor.start} of the model's flat storage, computed {place.buffer_start}"
    return ""


def _buffer_states(content: Mapping[object, object], index: int) -> dict[str, list[StoredTensor]]:
    """State name → its tensors (one, or one per bucket in old files)."""
    by_dtype = content.get(index)
    if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
        raise Unsupported(
            f"distributed optimizer: buffer {index} should have one entry per dtype pair, found {by_dtype!r:.80}"
        )
    (states,) = by_dtype.values()
    result: dict[str, list[StoredTensor]] = {}
    for name, value in states.items():
        if is_flat(value):
            result[MASTER if name == "param" else str(name)] = value if isinstance(value, list) else [value]
    return result


def is_flat(value: object) -> bool:
    """Whether a value of a buffer is a state of its parameters: one flat tensor, or one per bucket in old files."""
    tensors = value if isinstance(value, list) else [value]
    return all(isinstance(tensor, StoredTensor) and len(tensor.shape) == 1 for tensor in tensors)


def _located(
    buffers: Sequence[LocalBuffer], content: Mapping[object, object], params: Sequence[LocalParam], file: str
) -> dict[tuple[int, str], States]:
    shapes = {(p.vpp_rank, p.name): p.shape for p in params}
    located: dict[tuple[int, str], States] = {}
    for index, buffer in enumerate(buffers):
        for state, tensors in _buffer_states(content, index).items():
            ends = list(accumulate(t.shape[0] for t in tensors))
            for place in buffer.flat.places:
                tensor, start = _bucket_of(place, tensors, ends, file)
                shape = shapes[buffer.vpp_rank, place.name]
                at = StoredTensor(tensor.record, tensor.start + start, shape, row_major(shape))
                located.setdefault((buffer.vpp_rank, place.name), {})[state] = at
    return located


def _bucket_of(
    place: Place, tensors: Sequence[StoredTensor], ends: Sequence[int], file: str
) -> tuple[StoredTensor, int]:
    """The stored tensor that holds a parameter's state, and where in it that begins."""
    for tensor, end in zip(tensors, ends, strict=True):
        start = place.file_start - (end - tensor.shape[0])
        if start >= 0 and place.file_start + place.numel <= end:
            return tensor, start
    raise Unsupported(
        f"{file}: {place.name} lies across two buckets of an old file; save it once with a newer Megatron"
    )
