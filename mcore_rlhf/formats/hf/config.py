"""``config.json`` and the tensors: what one says of the other, and what a conversion changes in it.

Source: transformers 5.23.0, ``configuration_utils.py``; the names of layers as in ``models/llama/modeling_llama.py`` and all
that are made after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mcore_rlhf.core.catalog import DType, Shape, dtype_of
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.models.huggingface.config import misfits
from mcore_rlhf.storage.paths import ReadablePath

from .series import read_json

Config = Mapping[str, object]

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = "tie_word_embeddings"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OTHER_HEADS = ("score.", "classifier.", "value_head.", "v_head.", "summary.")
"""Tensors of models that predict something else than words."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""What 5.x of transformers writes, and what 4.x does; 5.x reads both."""
_CHECK_ADVICE = "The config is another model's, or was edited: take the one that belongs to these weights."


def read_own_config(folder: ReadablePath) -> dict[str, object]:
    """The ``config.json`` of a checkpoint's folder; empty where there is none.

    Raises:
        CheckpointError: It is no JSON.
    """
    return read_json(folder, "config.json") if (folder / "config.json").is_file() else {}


_OTHER_FILES = {
    "tokenizer_config.json": ("tokenizer_class", "added_tokens_decoder", "model_max_length", "chat_template"),
    "tokenizer.json": ("added_tokens", "pre_tokenizer", "post_processor"),
    "special_tokens_map.json": ("bos_token", "eos_token", "pad_token", "unk_token"),
    "generation_config.json": ("_from_model_config", "do_sample", "temperature", "top_p", "top_k", "max_new_tokens"),
    "preprocessor_config.json": ("image_processor_type", "feature_extractor_type", "processor_class"),
    "adapter_config.json": ("peft_type", "base_model_name_or_path"),
    "the weights' index": ("weight_map",),
    "trainer_state.json": ("log_history",),
    "DeepSpeed's configuration": ("zero_optimization", "train_micro_batch_size_per_gpu"),
}
"""What other files have that no description of a model without a ``model_type`` has."""
_OF_A_MODEL = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "text_config")


def refuse_other_file(config: Config, where: str) -> None:
    """Refuse a ``config.json`` that is another file's content.

    Args:
        config: Its content.
        where: The file, for messages.

    Raises:
        LayoutMismatch: It describes no model.
    """
    if any(key in config for key in _OF_A_MODEL):
        return
    for file, marks in _OTHER_FILES.items():
        found = [mark for mark in marks if mark in config]
        if found:
            raise LayoutMismatch(
                f"{where}: describes no model: it has {', '.join(found)}, as {file} has, and no model_type\n"
                "Put the model's own config.json in its place, or remove it and give --reference-config."
            )


def text_config(config: Config) -> Config:
    """The part that describes the language model: of a model with images or sound, a section of its own."""
    section = config.get("text_config")
    return section if isinstance(section, Mapping) else config


def check_config(
    config: Config, shapes: Mapping[str, Shape], tied: bool | None, where: str, *, whole: bool = True
) -> None:
    """Hold a model's description against its tensors, as far as their names are known.

    Args:
        config: The description; nothing is checked of an empty one.
        shapes: The tensors by name, tied second names left out.
        tied: Whether the output layer is the embedding; None where that is not known.
        where: Where the description comes from, for messages.
        whole: Whether the tensors are those of a whole model under its own names: quantized ones have others.

    Raises:
        LayoutMismatch: They contradict each other; every pair of values is named.
    """
    problems, text = Problems(), text_config(config)
    embedding = shapes.get(EMBEDDING)
    if embedding is not None and len(embedding) == 2:
        for key, count in (("vocab_size", embedding[0]), ("hidden_size", embedding[1])):
            _same(text, key, count, f"{EMBEDDING} is {list(embedding)}", where, problems)
    _check_layers(text, shapes, where, problems)
    for misfit in misfits(text, shapes) if whole and not problems else ():
        problems.add(LayoutMismatch, f"{where}: {misfit}", _CHECK_ADVICE)
    said = text.get(TIED)
    if isinstance(said, bool) and tied is not None and said != tied:
        found = "is the embedding itself" if tied else "is a tensor of its own"
        problems.add(LayoutMismatch, f"{where}: {TIED} is {str(said).lower()}, but {LM_HEAD} {found}", _CHECK_ADVICE)
    problems.raise_if_any()


def is_tied(config: Config, names: Collection[str], where: str) -> bool:
    """Whether the output layer is the embedding.

    Args:
        config: The description; may be empty.
        names: All tensors that are stored.
        where: Where the description comes from, for messages.

    Raises:
        LayoutMismatch: It is said to be a tensor of its own, and is not there.
    """
    said, text = text_config(config).get(TIED), text_config(config)
    if LM_HEAD in names:
        return said is True and EMBEDDING in names
    if EMBEDDING not in names or any(name.startswith(_OTHER_HEADS) for name in names):
        return False
    if said is not False:
        return True
    if _is_language_model(text) or _is_language_model(config):
        raise LayoutMismatch(f"{where}: {TIED} is false, but {LM_HEAD} is not among the tensors\n{_CHECK_ADVICE}")
    return False


def _is_language_model(config: Config) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)


def layers_in(names: Collection[str]) -> int:
    """How many decoder layers the names have."""
    return len({match.group(1) for name in names if (match := _LAYER.match(name))})


def _same(config: Config, key: str, found: int, what: str, where: str, problems: Problems) -> None:
    said = config.get(key)
    if isinstance(said, int) and said != found:
        problems.add(LayoutMismatch, f"{where}: {key} is {said}, but {what}", _CHECK_ADVICE)


def _check_layers(config: Config, shapes: Mapping[str, Shape], where: str, problems: Problems) -> None:
    """All layers are there, and none besides those that predict further tokens, which are numbered after them."""
    layers = {int(match.group(1)) for name in shapes if (match := _LAYER.match(name))}
    said, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not layers or not isinstance(said, int):
        return
    further = more if isinstance(more, int) else 0
    # Counted, not listed: the number stands in a file of somebody else's, and may be anything.
    if max(layers) + 1 != len(layers) or len(layers) not in (said, said + further):
        found = f"{len(layers)} layers, {min(layers)} to {max(layers)}"
        problems.add(
            LayoutMismatch, f"{where}: num_hidden_layers is {said}, but the tensors have {found}", _CHECK_ADVICE
        )


def with_dtype(config: Config, dtype: DType) -> dict[str, object]:
    """The description with another element type, under the keys that it has; under both where it has none."""
    present = [key for key in _DTYPE_KEYS if key in config]
    return {**config, **dict.fromkeys(present or _DTYPE_KEYS, dtype.name)}


def dtype_in(config: Config) -> DType | None:
    """The element type that a description names, or None."""
    for key in _DTYPE_KEYS:
        try:
            return dtype_of(config[key])
        except (KeyError, ValueError):
            continue
    return None


def with_eos(config: Config, eos: tuple[int, ...]) -> dict[str, object]:
    """A description, of the model or of how it generates, with the ids of the tokens that end a text."""
    return {**config, "eos_token_id": eos[0] if len(eos) == 1 else list(eos)} if eos else dict(config)


_CAUSAL = "ForCausalLM"
_AUTO = (
    _CAUSAL,
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageTextToText",
    "ForQuestionAnswering",
    "Model",
)
"""Ends of class names, each of which has an ``AutoModel`` of its own."""


def loading_line(folder: ReadablePath) -> str:
    """The line of Python; empty for a folder that does not say which model it is.

    Args:
        folder: The folder.
    """
    try:
        config = read_own_config(folder)
    except CheckpointError:
        return ""
    classes = config.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else _CAUSAL
    if not isinstance(config.get("model_type"), str):
        return ""
    code = ", trust_remote_code=True" if config.get("auto_map") else ""
    end = next((end for end in _AUTO if named.endswith(end)), None)
    loader = named if end is None else f"AutoModel{end.removesuffix('Model')}"
    return f'{loader}.from_pretrained("{folder}"{code})'
