"""What a model under Megatron's names lacks, as its own other names say: no file lists what should be there.

Sources: megatron-core 0.19.2, ``core/models/gpt/gpt_model.py``, ``core/transformer/transformer_block.py``; of models of images
mbridge 0.15.1, ``mbridge/models/qwen2_5_vl/__init__.py``; mcore_bridge 1.6.5, ``mcore_bridge/model/mm_gpt_model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import count

from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.megatron import EMBEDDING, expert_of, is_routed_expert, layer_of, renumbered

from .arguments import Arguments

_EVERY_LAYER = re.compile(
    r"(linear_(qkv|proj|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)|(input_layernorm|pre_mlp_layernorm|layer_norm_)\.?weight"
    r"|\bmlp\.(linear_fc[12]\.(weight|bias)|router\.weight))$"
)
"""Parameters without which a layer cannot compute: layers of one kind have the same. Others may be in some layers only."""
_TOGETHER = (
    ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
    ("mlp.linear_fc2.weight", "mlp.linear_fc1.weight"),
    ("mlp.linear_fc1.weight", "pre_mlp_layernorm.weight|mlp.linear_fc1.layer_norm_weight"),
    ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"),
    ("self_attention.linear_qkv.weight", "input_layernorm.weight|self_attention.linear_qkv.layer_norm_weight"),
    ("self_attention.linear_proj.weight",
     "self_attention.linear_qkv.weight|self_attention.linear_q_proj.weight|self_attention.linear_q_up_proj.weight"),
)  # fmt: skip
"""A layer with the first has one of the second; a kind that all layers have lost is missed by this alone."""
_OF_ADAPTER = ".adapter."
"""What Megatron-Bridge adds to a layer, and saves alone."""
_INSIDE = "language_model."
"""What bridges put before the names of a model's text, where it is of images as well."""
_FINAL_NORM = re.compile(r"^decoder\.final_(layer)?norm\.weight$")


def require_complete(where: str, names: Collection[str], args: Arguments) -> None:
    """Refuse a model that lacks something.

    Args:
        where: Its folder or file.
        names: Every parameter of the whole model.
        args: The run's.

    Raises:
        Incomplete: It does; everything is listed.
    """
    problems = Problems()
    for text in lacking(names, args):
        problems.add(Incomplete, f"{where}: {text}", "Copy the checkpoint again from where it came from.")
    problems.raise_if_any()


def refuse_part(source: Source, args: Arguments, to: str) -> None:
    """Refuse to write a part of a model, which ``--only`` leaves, where every reader asks for the whole.

    Args:
        source: What is to be written.
        args: The run's.
        to: The format.

    Raises:
        Unsupported: It is a part.
    """
    names = [spec.name for spec in source.model.params]
    layers, wanted = len(_layers_in(names)), args.optional("num_layers") or 0
    lost = list(lacking(names, args))
    if 0 < layers < wanted and args.pattern is None and not _made_elsewhere(args):
        lost.append(f"{layers} decoder layers are there, and args.num_layers is {wanted}")
    if lost:
        more = f", and {len(lost) - 1} more" if lost[1:] else ""
        raise Unsupported(
            f"{source.root}: what is taken of it is a part of a model, which {to} cannot hold: {lost[0]}{more}\n"
            "Leave --only out, or give patterns that take a head alone away (--only '!output_layer*')."
        )


def lacking(names: Collection[str], args: Arguments) -> Iterator[str]:
    """What is missing, a sentence each; nothing of layers whose making the arguments leave to other files, nor of their number.

    Args:
        names: Every parameter of the whole model.
        args: The run's.

    Raises:
        Unsupported: It is a model of images.
    """
    if f"{_INSIDE}{EMBEDDING}" in names:
        beside = next((name for name in names if not name.startswith(_INSIDE)), None)
        raise Unsupported(
            f"a model of images{f' ({beside}, …)' if beside else ''}, whose text lies below {_INSIDE.removesuffix('.')}: "
            "a GPTModel alone is known\n"
            "Nothing is wrong with it. Have the trainer that wrote it export it under Hugging Face's names, which every format here takes."
        )
    names = dict.fromkeys(
        sorted(name for name in names if _OF_ADAPTER not in name)
    )  # looked up, and gone through in order
    layers = _layers_in(names)
    if not layers or (_made_elsewhere(args) and args.pattern is None):
        return
    if len(layers) <= max(layers):
        yield f"decoder layer {_first_beside(layers)} is missing, and there is a layer {max(layers)}"
    if EMBEDDING not in names:
        yield f"{EMBEDDING} is missing"
    if not any(map(_FINAL_NORM.match, names)):
        yield "decoder.final_layernorm.weight is missing"
    yield from _of_layers(names, args.pattern.layers if args.pattern is not None else "")
    yield from _of_pairs(names)
    yield from _of_experts(names, args.num_experts or 0)


def _layers_in(names: Collection[str]) -> set[int]:
    return {layer for name in names if (layer := layer_of(name)) is not None}


def _made_elsewhere(args: Arguments) -> bool:
    """Whether another file says what each layer is; some may have no parameters at all."""
    return any(args.values.get(name) for name in ("heterogeneous_layers_config_path", "spec"))


def _of_layers(names: Collection[str], kinds: str) -> Iterator[str]:
    """A layer whose keys are a part of another's of its kind has lost some.

    Args:
        names: All.
        kinds: A symbol for each layer, where they are of several kinds; each kind then has the same keys in all layers.
    """
    suffixes: dict[int, frozenset[str]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None and (kinds or _EVERY_LAYER.search(name)) and not is_routed_expert(name):
            suffixes[layer] = suffixes.get(layer, frozenset()) | {name.partition(f"layers.{layer}.")[2]}
    kind = {layer: kinds[layer : layer + 1] for layer in suffixes}
    whole = {(kind[layer], keys): layer for layer, keys in suffixes.items()}
    for layer, keys in suffixes.items():
        for (alike, more), other in whole.items():
            if keys < more and alike == kind[layer]:
                yield f"decoder layer {layer} has no {', '.join(sorted(more - keys)[:3])}, which layer {other} has"
                break


def _of_pairs(names: Collection[str]) -> Iterator[str]:
    for name in names:
        if (layer := layer_of(name)) is None:
            continue
        at, dot, of_layer = name.partition(f"layers.{layer}.")
        for first, second in _TOGETHER:
            if of_layer == first and not any(f"{at}{dot}{one}" in names for one in second.split("|")):
                yield f"{at}{dot}{second.partition('|')[0]} is missing, and {name} is there"


def _of_experts(names: Collection[str], experts: int) -> Iterator[str]:
    """Each of the routed experts has what the first has."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if is_routed_expert(name) and (number := expert_of(name)) is not None:
            numbers.setdefault(renumbered(name, 0, -number), set()).add(number)
    for first, found in numbers.items():
        if len(found) < experts:
            yield f"{renumbered(first, 0, _first_beside(found))} is missing, and there are {experts} experts"


def _first_beside(numbers: Collection[int]) -> int:
    return next(number for number in count() if number not in numbers)
