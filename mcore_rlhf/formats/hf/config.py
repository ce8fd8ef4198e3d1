"""``config.json`` and the tensors: what one says of the other, and what a conversion changes in it; and the files
that go along as they are: the tokenizer, how the model generates, and code that is never run here.

Source: transformers 5.23.0, ``configuration_utils.py``; the names of layers as in ``models/llama/modeling_llama.py`` and all
that are made after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from mcore_rlhf.core.catalog import DType, Shape, dtype_of
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems, UsageError
from mcore_rlhf.models.huggingface.config import foreign_names, misfits
from mcore_rlhf.models.meaning.declared import config_fields
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, cannot_open
from mcore_rlhf.suggestions import hub_name

from .files import CHAT_TEMPLATES, CONFIG, GENERATION_CONFIG, is_code, is_of_tokenizer
from .series import read_json

Config = Mapping[str, object]

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VALUE_HEAD = "score.weight"
TIED = "tie_word_embeddings"
_LAYER = re.compile(r"model\.layers\.(\d{1,18})\.")
_OTHER_HEADS = ("score.", "classifier.", "value_head.", "v_head.", "summary.")
"""Tensors of models that predict something else than words."""
_NO_HEADS = ("model.", "mtp.")
"""Where there is no output layer, whatever it is called."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""What 5.x of transformers writes, and what 4.x does; 5.x reads both."""
_OWN_ATTRIBUTES = ("model", "transformer", "gpt_neox", "backbone")
"""Below which classes of transformers' own have their layers."""
_NAMES_ADVICE = (
    "from_pretrained would leave every weight random. Let the program that wrote them convert them, which knows what is which; "
    "without a config the tensors are written as they are."
)
_CHECK_ADVICE = (
    "The config is another model's, or was edited, or --only took a part: take the one that belongs to these weights."
)


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


def wrapper_of(names: Iterable[str]) -> str:
    """The attribute below which a model lies, beside a head that its class does not have: ``rwtransformer`` of DeepSpeed-Chat's critics.

    Empty where it is no such model. Source: DeepSpeedExamples 45b4b71, ``applications/DeepSpeed-Chat/dschat/utils/model/reward_model.py``
    (``RewardModel``), ``dschat/utils/utils.py`` (``save_hf_format``: the base model's ``config.json``).
    """
    names = list(names)
    within = {name.partition(".")[0] for name in names if not name.startswith(_OTHER_HEADS)}
    headed = any(name.startswith(_OTHER_HEADS) for name in names)
    return within.pop() if headed and len(within) == 1 and within.isdisjoint(_OWN_ATTRIBUTES) else ""


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
    embedding, head = shapes.get(EMBEDDING), shapes.get(LM_HEAD)
    if embedding is not None and len(embedding) == 2:
        words = _is_known(text) or head is None  # Moshi's embedding has a row that is no word
        for key, count in (*([("vocab_size", embedding[0])] if words else []), ("hidden_size", embedding[1])):
            _same(text, key, count, f"{EMBEDDING} is {list(embedding)}", where, problems)
    if head is not None and len(head) == 2 and not problems:
        _same(text, "vocab_size", head[0], f"{LM_HEAD} is {list(head)}", where, problems)
    _check_layers(text, shapes, where, problems)
    for misfit in misfits(text, shapes) if whole and not problems else ():
        problems.add(LayoutMismatch, f"{where}: {misfit}", _CHECK_ADVICE)
    foreign = foreign_names(text, shapes) if whole and text is config else ""
    if foreign:
        problems.add(LayoutMismatch, f"{where}: {foreign}", _NAMES_ADVICE)
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
    # a class that nobody has looked at may call it otherwise: DeepSeek-V4's is head.weight
    elsewhere = not _is_known(text) and any(not name.startswith(_NO_HEADS) for name in names)
    if not elsewhere and (_is_language_model(text) or _is_language_model(config)):
        raise LayoutMismatch(f"{where}: {TIED} is false, but {LM_HEAD} is not among the tensors\n{_CHECK_ADVICE}")
    return False


def _is_known(config: Config) -> bool:
    """Whether it is of a class of which it is known which tensors there are."""
    return bool(config_fields(str(config.get("model_type"))))


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


def files_beside(own: Mapping[str, ReadablePath], tokenizer: str | None) -> dict[str, ReadablePath]:
    """Everything beside the weights that goes into a new folder as it is, by its name there.

    Args:
        own: Files that go along with the source.
        tokenizer: Folder whose tokenizer takes the place of the source's own, or None.

    Raises:
        UsageError: There is no such folder, or no tokenizer in it.
    """
    found = {name: path for name, path in own.items() if name not in (CONFIG, GENERATION_CONFIG)}
    if tokenizer is None:
        return found
    given = _tokenizer_files(Path(tokenizer).expanduser())
    return {**{name: path for name, path in found.items() if not is_of_tokenizer(name)}, **given}


def _tokenizer_files(folder: ReadablePath) -> dict[str, ReadablePath]:
    """The tokenizer in a folder that the user gave, with the code that its configs name; nothing else in it is looked at."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: there is no such folder to take a tokenizer from{hub_name(str(folder), local=True)}"
        )
    paths = sorted([*folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATES}/*")])
    names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    found = [name for name in names if is_of_tokenizer(name)]
    if not found:
        raise UsageError(
            f"{folder}: there is no tokenizer in it; looked for tokenizer.json, tokenizer.model, vocab.json, …"
        )
    code = [name for name in names if is_code(name) and name not in found] if _names_code(folder) else []
    return {name: folder / name for name in (*found, *code)}


def generation_config(
    given: str | None, beside: Iterable[str | ReadablePath | None], eos: tuple[int, ...]
) -> bytes | None:
    """The ``generation_config.json`` to write: what is given, otherwise the first there is; byte for byte if nothing changes.

    Args:
        given: The user's own: a file, or a folder with one.
        beside: Folders that may have one.
        eos: Ids of the tokens that end a text; empty to leave them.

    Raises:
        UsageError: What is given is not there.
        CheckpointError: It is no JSON.
    """
    if given is not None:
        named = Path(given).expanduser()
        named = named / GENERATION_CONFIG if named.is_dir() else named
        if not named.is_file():
            raise UsageError(f"--generation-config: {named}: no such file")
        path: ReadablePath | None = named
    else:
        folders = (Path(folder).expanduser() if isinstance(folder, str) else folder for folder in beside if folder)
        path = next((place for folder in folders if (place := folder / GENERATION_CONFIG).is_file()), None)
    own = read_json(path.parent, path.name) if path is not None else {}
    if not eos:
        return _content(path) if path is not None else None
    return (json.dumps(with_eos(own, eos), indent=2) + "\n").encode()


def check_vocabulary(files: Mapping[str, ReadablePath], rows: int | None) -> None:
    """Every id that the tokenizer makes has a row in the embedding; further rows are usual.

    Args:
        files: What :func:`files_beside` found.
        rows: Rows of the embedding, or None where there is none.

    Raises:
        LayoutMismatch: There are too few rows.
    """
    ids = [
        number
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json")
        if name in files
        for number in _ids(name, _content(files[name]))
    ]
    if rows is None or not ids or max(ids) < rows:
        return
    raise LayoutMismatch(
        f"the tokenizer has ids up to {max(ids)}, so it needs {max(ids) + 1} rows, but the model's embedding has {rows}\n"
        "It is another model's tokenizer, or words were added to it after training; a smaller --vocab-size would also do this."
    )


def _ids(name: str, content: bytes) -> Iterator[int]:
    """All ids in one of the tokenizer's files.

    Source: huggingface/tokenizers, ``tokenizers/src/tokenizer/serialization.rs``: ``added_tokens`` and ``model.vocab``, which is
    a list for ``Unigram`` and a mapping otherwise.
    """
    tree = _parsed(name, content)
    if name != "tokenizer.json":
        yield from _numbers(tree.values())
        return
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list) and vocabulary:
        yield len(vocabulary) - 1
    elif isinstance(vocabulary, dict):
        yield from _numbers(vocabulary.values())
    yield from (
        _numbers(token.get("id") for token in added or () if isinstance(token, dict)) if isinstance(added, list) else ()
    )


def _parsed(name: str, content: bytes) -> dict[str, object]:
    try:
        tree = reading.parse_json(content)
    except ValueError as error:
        raise LayoutMismatch(
            f"{name}: is no JSON: {error}\nTake the tokenizer's files from where the model was published."
        ) from None
    return tree if isinstance(tree, dict) else {}


def _numbers(values: object) -> Iterator[int]:
    yield from (value for value in values if isinstance(value, int))  # type: ignore[attr-defined]


def _names_code(folder: ReadablePath) -> bool:
    """Whether a config there names code of its own, which may import more of what lies beside it: carried, never run."""
    for config in (CONFIG, "tokenizer_config.json"):
        section = (read_json(folder, config) if (folder / config).is_file() else {}).get("auto_map")
        values = section.values() if isinstance(section, dict) else ()
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        if any(isinstance(text, str) and "--" not in text for text in texts):  # "--" refers to another repository
            return True
    return False


def _content(path: ReadablePath) -> bytes:
    try:
        return reading.read_bytes(path)
    except OSError as error:
        raise cannot_open(error, path) from error
