"""Pipeline parallelism: which layers lie in which model chunk of which stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rlhf.errors import LayoutMismatch, UsageError, shown
from mcore_rlhf.models.meaning.bounds import MOST_LETTERS


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """What one model chunk holds.

    Args:
        pp_rank: Its pipeline stage.
        vpp_rank: Its number within the stage.
        first_layer: Global number of its first decoder layer.
        num_layers: Decoder layers in it.
        mtp: Whether it holds the multi-token-prediction layers.
        embedding: Whether it is the first chunk, which embeds the input.
        loss: Whether it is the last chunk, which has the output layer.
        holds_last_layer: Whether the last decoder layer is in it.
    """

    pp_rank: int
    vpp_rank: int
    first_layer: int
    num_layers: int
    mtp: bool
    embedding: bool
    loss: bool
    holds_last_layer: bool


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """How decoder layers are dealt to chunks, in Megatron's own terms; all None or False is an even split.

    Args:
        first: ``decoder_first_pipeline_num_layers``: layers of the first stage.
        last: ``decoder_last_pipeline_num_layers``: layers of the last stage.
        count_embedding: ``account_for_embedding_in_pipeline_split``: the embedding counts as one layer.
        count_loss: ``account_for_loss_in_pipeline_split``: the output layer counts as one layer.
        layout: ``pipeline_model_parallel_layout``: a string such as ``Ettt|(tt|)*29,m|L``.
        counts: Layers of every chunk, as the marks in a hybrid model's pattern say them.
    """

    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    layout: str | None = None
    counts: tuple[int, ...] | None = None

    @property
    def even(self) -> bool:
        """Whether nothing special was asked for."""
        return self == PipelineSplit()


def model_chunks(
    num_layers: int, pp: int, vpp: int, split: PipelineSplit, mtp_layers: int = 0
) -> tuple[ModelChunk, ...]:
    """All model chunks of a model, in the order in which a token passes them (chunk by chunk, stage by stage).

    Sources: megatron-core 0.16.1, ``transformer/transformer_block.py`` (``get_num_layers_to_build``),
    ``transformer/pipeline_parallel_layer_layout.py``, ``transformer/multi_token_prediction.py``.

    Args:
        num_layers: Decoder layers of the model.
        pp: Pipeline stages.
        vpp: Model chunks per stage.
        split: How the layers are dealt.
        mtp_layers: Multi-token-prediction layers; all of them lie in one chunk.

    Raises:
        LayoutMismatch: The layers cannot be dealt that way.
    """
    if split.layout is not None:
        letters = parse_layout(split.layout)
        _check_layout(letters, split.layout, num_layers, pp, vpp, mtp_layers)
        counts, mtp = [stage.count("t") for stage in letters], [stage.count("m") for stage in letters]
    else:
        counts = (
            _counts(num_layers, pp, vpp, split) if split.counts is None else _marked(num_layers, pp, vpp, split.counts)
        )
        mtp = [0] * (pp * vpp - 1) + [mtp_layers]
    chunks, layer = [], 0
    for index, (count, mtp_count) in enumerate(zip(counts, mtp, strict=True)):
        vpp_rank, pp_rank = divmod(index, pp)
        holds_last = count > 0 and layer + count == num_layers
        last = index == pp * vpp - 1
        chunks.append(ModelChunk(pp_rank, vpp_rank, layer, count, mtp_count > 0, index == 0, last, holds_last))
        layer += count
    return tuple(chunks)


def _counts(num_layers: int, pp: int, vpp: int, split: PipelineSplit) -> list[int]:
    """Decoder layers per chunk, in passing order."""
    per_stage = _per_stage(num_layers, pp, split)
    bad = [stage for stage, layers in enumerate(per_stage) if layers % vpp]
    if bad:
        raise LayoutMismatch(
            f"the {per_stage[bad[0]]} layers of pipeline stage {bad[0]} cannot be divided equally over {vpp} model chunks; "
            "choose another --vpp, or give --pipeline-layout"
        )
    counts = [per_stage[stage] // vpp for _ in range(vpp) for stage in range(pp)]
    counts[0] -= split.count_embedding
    counts[-1] -= split.count_loss
    return counts


def _marked(num_layers: int, pp: int, vpp: int, counts: Sequence[int]) -> list[int]:
    """Decoder layers per chunk, as they are said."""
    if len(counts) != pp * vpp or sum(counts) != num_layers:
        said = ", ".join(map(str, counts))
        raise LayoutMismatch(
            f"{len(counts)} chunks of {said} layers do not deal {num_layers} layers to PP {pp} × VPP {vpp} = {pp * vpp} chunks"
        )
    return list(counts)


def _per_stage(num_layers: int, pp: int, split: PipelineSplit) -> list[int]:
    if pp == 1:
        return [num_layers + split.count_embedding + split.count_loss]
    if split.first is None and split.last is None:
        total = num_layers + split.count_embedding + split.count_loss
        return [_even(total, pp, num_layers)] * pp
    middle = num_layers - (split.first or 0) - (split.last or 0)
    stages = pp - (split.first is not None) - (split.last is not None)
    per_stage = _even(middle, stages, num_layers) if stages else 0
    if middle < 0 or (stages == 0 and middle):
        raise LayoutMismatch(
            f"{split.first} first and {split.last} last layers do not add up to {num_layers} on {pp} stages"
        )
    counts = [per_stage] * pp
    if split.first is not None:
        counts[0] = split.first
    if split.last is not None:
        counts[-1] = split.last
    return counts


def _even(layers: int, stages: int, num_layers: int) -> int:
    if layers % stages:
        part = f"{layers} of the model's {num_layers}" if layers != num_layers else f"{num_layers}"
        raise LayoutMismatch(
            f"{part} layers cannot be divided equally over {stages} pipeline stages\n"
            "Choose another --pp, or say how to deal them: --pipeline-layout 3,5,4 (layers per stage) or 'Ettt|ttttt|ttttL'."
        )
    return layers // stages


_REPEATED = (re.compile(r"\(([^)]+)\)\*([0-9]{1,6})"), re.compile(r"(.)\*([0-9]{1,6})"))


def parse_layout(text: str) -> list[str]:
    """The letters of every chunk in a layout string: ``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` loss.

    ``x*n`` repeats a letter, ``(…)*n`` a group, ``|`` ends a chunk, commas are decoration.

    Raises:
        UsageError: The string has other characters.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        if len(unrolled) + sum(len(m[1]) * int(m[2]) for m in pattern.finditer(unrolled)) > MOST_LETTERS:
            raise UsageError(f"pipeline layout {shown(text)}: makes more than {MOST_LETTERS:,} letters of itself")
        unrolled = pattern.sub(lambda match: match[1] * int(match[2]), unrolled)
    strange = sorted(set(unrolled) - set("EtmL|"))
    if strange:
        raise UsageError(
            f"pipeline layout {shown(text)}: unknown {' '.join(strange[:20])}; E is the embedding, t a decoder layer, m an MTP layer, "
            "L the loss, | ends a chunk, x*n and (…)*n repeat"
        )
    return unrolled.split("|")


def _check_layout(chunks: list[str], text: str, num_layers: int, pp: int, vpp: int, mtp_layers: int) -> None:
    letters = "".join(chunks)
    expected = {"E": 1, "t": num_layers, "m": mtp_layers, "L": 1}
    wrong = [f"{letters.count(c)} × {c} instead of {n}" for c, n in expected.items() if letters.count(c) != n]
    if len(chunks) != pp * vpp:
        wrong.append(f"{len(chunks)} chunks instead of PP {pp} × VPP {vpp} = {pp * vpp}")
    if letters and (letters[0] != "E" or letters[-1] != "L"):
        wrong.append("it must begin with E and end with L")
    if wrong:
        raise LayoutMismatch(f"pipeline layout {shown(text)} does not fit this model: {'; '.join(wrong)}")


_COUNTS = re.compile(r"\s*[0-9]{1,6}(\s*,\s*[0-9]{1,6})*\s*")


def chunks_in_option(text: str) -> int:
    """Of how many model chunks a ``--pipeline-layout`` speaks.

    Raises:
        UsageError: It is neither numbers nor a layout string.
    """
    return text.count(",") + 1 if _COUNTS.fullmatch(text) else len(parse_layout(text))


def split_from_option(text: str, num_layers: int, pp: int, vpp: int, mtp_layers: int) -> PipelineSplit:
    """Understand ``--pipeline-layout``: Megatron's own string, or layers per chunk such as ``3,5,4``.

    Counts that differ only in the first and last stage become Megatron's first/last options, other counts a string.

    Raises:
        UsageError: The text is neither, or its numbers do not fit.
    """
    if not _COUNTS.fullmatch(text):
        return PipelineSplit(layout=text)
    counts = [int(count) for count in text.split(",")]
    if len(counts) != pp * vpp or sum(counts) != num_layers:
        raise UsageError(
            f"--pipeline-layout {text}: expected {pp * vpp} numbers (PP {pp} × VPP {vpp}) that add up to {num_layers} layers, "
            f"found {len(counts)} that add up to {sum(counts)}"
        )
    if len(set(counts)) == 1:
        return PipelineSplit()
    if vpp == 1 and pp > 2 and not mtp_layers and len(set(counts[1:-1])) == 1:
        return PipelineSplit(first=counts[0], last=counts[-1])
    if vpp == 1 and pp == 2:
        return PipelineSplit(first=counts[0], last=counts[1])
    letters = ["t" * count for count in counts]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * mtp_layers + "L"
    return PipelineSplit(layout="|".join(letters))
