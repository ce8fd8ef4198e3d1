"""Quantized weights: what is stored is not the value, so it is never converted as if it were.

Elements of fp8 with scales are values times scales, and become plain weights on request (``--dequantize``). Everything else that
quantizes (GPTQ, AWQ, bitsandbytes, MXFP4, …) goes from one Hugging Face folder to another as it is, and is refused elsewhere.

Sources: transformers 5.23.0, ``integrations/finegrained_fp8.py`` (``Fp8Dequantize``), ``quantizers/``; deepseek-ai/DeepSeek-V3,
``inference/kernel.py`` (``weight_dequant``); vllm-project/compressed-tensors 0.12, ``quantization/lifecycle/forward.py`` (``dequantize``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from mcore_rlhf.core.catalog import (
    BFLOAT16,
    PARAM,
    Chunk,
    DType,
    Shape,
    TensorEntry,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Reason, Rule, Values
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.families.module import CONFIG, ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Computed, Source
from mcore_rlhf.models.huggingface.config import QUANTIZATION, quantization_in, without_quantization
from mcore_rlhf.models.spec import FP8, OTHERWISE_QUANTIZED, SCALE, ParamSpec
from mcore_rlhf.storage.leftovers import CarriedFiles

if TYPE_CHECKING:
    from mcore_rlhf.core.computed import Scaled

Config = Mapping[str, object]

_ACTIVATION = re.compile(r".*[._](input|output|activation|[qkv]|kv|k_proj\.output|v_proj\.output)_scales?(_inv|_ub)?")
_BESIDE = frozenset(
    {"quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json", "recipe.yaml"}
)
"""Files that describe how weights are quantized."""
_BLOCK = (128, 128)


def refuse_quantized(source: Source, method: str) -> None:
    """Refuse to convert quantized weights as if they were plain ones.

    Args:
        source: What has such weights, which would not stay as they are.
        method: How its description says that they are quantized; empty where it does not.

    Raises:
        Unsupported: It is not done.
    """
    marked = [spec.name for spec in source.model.params if spec.quantized]
    what = f"{marked[0]} and {len(marked) - 1} more tensors" if marked else f"{CONFIG}"
    by = f", by {method}" if method else ""
    raise Unsupported(
        f"{source.root}: {what} say that the weights are quantized{by}: a stored element is not its value, and would be converted wrongly\n"
        + _advice(marked)
    )


def _advice(marked: list[str]) -> str:
    if not marked:
        return (
            f"If they are plain weights, take {QUANTIZATION[0]} out of {CONFIG}; otherwise take the model as it was before it was "
            "quantized."
        )
    if any(map(OTHERWISE_QUANTIZED.fullmatch, marked)):
        return (
            "Take the model as it was before it was quantized, or make it plain with the tool that quantized it. "
            "--to hf without --dtype keeps it as it is."
        )
    return "Give --dequantize: elements of fp8 become their values, times their scales. --to hf without --dtype keeps them as they are."


def dequantized(source: Source, options: WriteOptions) -> Source:
    """The source with plain weights, which are computed when they are looked at.

    Args:
        source: A Hugging Face folder with weights of fp8 and their scales.
        options: ``dtype``, where another one than the description's is wanted.

    Raises:
        UsageError: Nothing is quantized.
        Unsupported: Something else than fp8 with scales is among the tensors.
        LayoutMismatch: Weights have no scales, or ones of other shapes.
    """
    family = ModuleState.of(source)
    if family is None or not source.model.quantized:
        raise UsageError(f"--dequantize: no weight of {source.root} is quantized\nLeave it out.")
    return _Dequantizing(source, family, _dtype(family.config, options)).source_of_values()


@dataclass
class _Dequantizing:
    source: Source
    family: ModuleState
    dtype: DType
    problems: Problems = field(default_factory=Problems)

    def source_of_values(self) -> Source:
        source, specs = self.source, {spec.name: spec for spec in self.source.model.params}
        scales = {
            match[1]: name for name in specs if (match := SCALE.fullmatch(name)) and not _ACTIVATION.fullmatch(name)
        }
        self._refuse_others(specs, scales)
        made = {
            name: found
            for name, scale in scales.items()
            if (found := self._scaled(specs[name], specs[scale])) is not None
        }
        self.problems.raise_if_any()
        activations = [name for name in specs if _ACTIVATION.fullmatch(name)]
        gone = {*scales.values(), *activations}
        kept = [
            replace(spec, dtype=self.dtype) if name in made else spec
            for name, spec in specs.items()
            if name not in gone
        ]
        config = without_quantization(self.family.config)
        family = replace(
            self.family, config=config, order=tuple(name for name in self.family.order if name not in gone)
        )
        self.source.notes.through(_RULES, {"made": len(made), "dtype": self.dtype, "activations": activations})
        return replace(
            source, model=source.model.having(kept), catalog=self._catalog(made, gone), family=family,
            computed=Computed(source.root, {found.record.file: found for found in made.values()}),
            carried=None if source.carried is None else _updated(source.carried, config),
        )  # fmt: skip

    def _refuse_others(self, specs: Mapping[str, ParamSpec], scales: Mapping[str, str]) -> None:
        others = [name for name in specs if OTHERWISE_QUANTIZED.fullmatch(name)]
        if others:
            text = f"{others[0]} and {len(others) - 1} more tensors are not fp8 with scales, which is all that --dequantize knows"
            self.problems.add(Unsupported, f"{self.source.root}: {text}", _advice(others))
        for name, spec in specs.items():
            if spec.dtype in FP8 and name not in scales and name not in others:
                self.problems.add(
                    LayoutMismatch, f"{self.source.root}: {name} is {spec.dtype}, but has no scale beside it"
                )
        for name, scale in scales.items():
            if name not in specs:
                self.problems.add(LayoutMismatch, f"{self.source.root}: {scale} is there, but {name} is not")
            elif specs[name].dtype not in FP8 or len(specs[name].global_shape) != 2:
                text = f"{name} is {specs[name].dtype} {list(specs[name].global_shape)}, expected a matrix of fp8 beside {scale}"
                self.problems.add(Unsupported, f"{self.source.root}: {text}")
        self.problems.raise_if_any()

    def _scaled(self, weight: ParamSpec, scale: ParamSpec) -> Scaled | None:
        from mcore_rlhf.core.computed import Scaled  # needs numpy, which looking at a folder does not

        entries = [self.source.catalog.get(TensorName(self.source.role, spec.name, PARAM)) for spec in (weight, scale)]
        block = _block(weight.global_shape, scale.global_shape, self.family.config)
        if block is None or scale.dtype.name.startswith(("int", "uint")):
            text = f"{scale.name} is {scale.dtype} {list(scale.global_shape)}, which fits no blocks of {list(weight.global_shape)}"
            self.problems.add(LayoutMismatch, f"{self.source.root}: {text}")
            return None
        stored = [entry for entry in entries if entry is not None]  # a Hugging Face folder stores every tensor it names
        return Scaled(stored[0], stored[1], block, self.dtype)

    def _catalog(self, made: Mapping[str, Scaled], gone: set[str]) -> Chunks:
        entries: dict[TensorName, TensorEntry] = {}
        for stored in self.source.catalog.entries():
            name = stored.name
            found = made.get(name.param) if name.state == PARAM else None
            if found is not None:
                shape = found.weight.global_shape
                chunk = Chunk.whole(found.record, shape)
                entries[name] = TensorEntry(name, shape, self.dtype, (chunk,))
            elif name.param not in gone:
                entries[name] = stored
        return Chunks.of(entries.values())


_RULES: tuple[Rule[Values], ...] = (
    Rule(Fate.CHANGED, "--dequantize: {made} weights become fp8 element · scale, computed in fp32 and rounded once to {dtype}", dict),
    Rule(Fate.LOST, "the fp8 elements and scales by themselves: they cannot be had back exactly from {dtype}", dict),
    Rule(Fate.LOST, "{count} scales of activations, such as {activations:1}: plain weights have none",
         lambda v: {**v, "count": len(v["activations"])} if v["activations"] else None),
)  # fmt: skip


def _block(weight: Shape, scale: Shape, config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where the shapes do not fit.

    One scale is the whole matrix's, one for each row is a channel's. Otherwise the blocks are those that the description
    says, DeepSeek's 128 × 128 (the last ones may be cut off), or what divides the matrix evenly, as transformers has it.
    """
    rows, columns = weight
    if prod(scale) == 1:
        return rows, columns
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale) != 2:
        return None
    for high, wide in (*_said_block(config), _BLOCK):
        if (-(-rows // high), -(-columns // wide)) == scale:
            return high, wide
    return None if rows % scale[0] or columns % scale[1] else (rows // scale[0], columns // scale[1])


def _said_block(config: Config) -> Iterable[tuple[int, int]]:
    said = quantization_in(config).get("weight_block_size")
    if isinstance(said, list) and len(said) == 2 and all(type(number) is int and number > 0 for number in said):
        yield said[0], said[1]


def _dtype(config: Config, options: WriteOptions) -> DType:
    """What the values are rounded to: what is asked for, otherwise what the model computes in."""
    if options.dtype is not None:
        return dtype_of(options.dtype)
    for said in (config.get("dtype"), config.get("torch_dtype")):
        try:
            found = dtype_of(said)
        except ValueError:
            continue
        return found if found not in FP8 else BFLOAT16
    return BFLOAT16


def _updated(carried: CarriedFiles, config: Config) -> CarriedFiles:
    """The files beside the weights, which are not quantized any more."""
    found = tuple(
        replace(item, reason=item.reason or Reason.OUTDATED) if item.path in _BESIDE else item for item in carried.found
    )
    return replace(carried, found=found, texts={**carried.texts, CONFIG: json.dumps(dict(config), indent=2) + "\n"})
