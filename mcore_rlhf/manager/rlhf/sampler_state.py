"""What is saved of a prompt sampler, and the checks that a saved state has to pass before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import Corrupt, LayoutMismatch, Problems
from .data_state import WHERE, check_fields
from .progress import Progress
from .prompt_order import PromptOrder
from .seeds import ORDER_VERSION

_SETTINGS = ("order", "seed", "group_size", "shuffle", "num_prompts", "epoch_length")
_FIELDS = (*_SETTINGS, "next", "consumed", "in_flight")
_IN_FLIGHT = ("epoch", "position", "prompt_id", "pending")
_KEEP = "Resume with the settings that the run was started with, or start the data anew by not loading this file."


def to_state(order: PromptOrder, progress: Progress) -> dict[str, Any]:
    """As plain values that a person can read. Its size depends on what is in flight, not on what was consumed."""
    epoch, position = order.place(progress.yielded)
    return {
        **_settings(order),
        "next": {"epoch": epoch, "position": position},
        "consumed": progress.consumed,
        "in_flight": [_entry(order, slot, pending) for slot, pending in sorted(progress.in_flight.items())],
    }


def _settings(order: PromptOrder) -> dict[str, Any]:
    return {"order": ORDER_VERSION, **{name: getattr(order, name) for name in _SETTINGS if name != "order"}}


def _entry(order: PromptOrder, slot: int, pending: tuple[int, ...]) -> dict[str, Any]:
    epoch, position = order.place(slot)
    return {"epoch": epoch, "position": position, "prompt_id": order.prompt_id(slot), "pending": list(pending)}


def check_form(state: Mapping[str, Any]) -> None:
    """Refuse a state whose fields are not those of this version, or not numbers where numbers belong.

    Raises:
        CheckpointError: All such fields are named.
    """
    problems = check_fields(state, _FIELDS, f"{WHERE}: state")
    for name in ("order", "seed", "group_size", "num_prompts", "epoch_length", "consumed"):
        if name in state and type(state[name]) is not int:
            problems.add(Corrupt, f"{WHERE}: state.{name}: expected a whole number, found {state[name]!r}")
    if "next" in state and not _is_place(state["next"]):
        problems.add(Corrupt, f"{WHERE}: state.next: expected an epoch and a position, found {state['next']!r}")
    entries = state.get("in_flight", [])
    wrong = [] if not isinstance(entries, list) else [entry for entry in entries if not _is_entry(entry)]
    if not isinstance(entries, list) or wrong:
        problems.add(
            Corrupt, f"{WHERE}: state.in_flight: expected a list of prompts, found {(wrong or [entries])[0]!r}"
        )
    problems.raise_if_any()


def _is_place(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"epoch", "position"} and _whole(*value.values())


def _is_entry(value: object) -> bool:
    if not isinstance(value, Mapping) or value.keys() != set(_IN_FLIGHT) or not isinstance(value["pending"], list):
        return False
    return _whole(*(value[name] for name in _IN_FLIGHT if name != "pending"), *value["pending"])


def _whole(*values: object) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def check_settings_match(state: Mapping[str, Any], order: PromptOrder, problems: Problems) -> None:
    """Note every setting that changed and that decides which prompt stands where; the dataset's size is not one."""
    now = _settings(order)
    same_dataset = state["num_prompts"] == order.num_prompts
    for name in _SETTINGS:
        if name == "num_prompts" or (name == "epoch_length" and not same_dataset):
            continue
        if state[name] != now[name]:
            what = f"{name} (of batch_size and last_batch)" if name == "epoch_length" else name
            problems.add(
                LayoutMismatch,
                f"{WHERE}: {what}: expected {now[name]!r}, as this run has, found {state[name]!r}",
                _KEEP,
            )


def read_progress(state: Mapping[str, Any], order: PromptOrder, epochs: int | None) -> Progress:
    """The progress that a state of the same settings and dataset describes.

    Args:
        state: Has passed :func:`check_form` and :func:`check_settings_match`.
        order: The sampler's.
        epochs: How many epochs the run has now; None without end.

    Raises:
        CheckpointError: Its numbers contradict each other, or go beyond the run's epochs; all of them are named.
    """
    next_place, length = state["next"], order.epoch_length
    progress = Progress(order.slot(next_place["epoch"], next_place["position"]))
    problems = Problems()
    if next_place["position"] >= length:
        problems.add(
            Corrupt, f"{WHERE}: state.next: expected a position below {length}, found {next_place['position']}"
        )
    for entry in state["in_flight"]:
        for text in _contradictions(entry, order, progress):
            problems.add(Corrupt, f"{WHERE}: state.in_flight: {text}")
        progress.in_flight[order.slot(entry["epoch"], entry["position"])] = tuple(sorted(entry["pending"]))
    if progress.consumed != state["consumed"]:
        text = f"expected {progress.consumed} (handed out − in flight), found {state['consumed']}"
        problems.add(Corrupt, f"{WHERE}: state.consumed: {text}")
    if epochs is not None and progress.yielded > epochs * length:
        text = f"the run has {epochs} now, but prompts of epoch {(progress.yielded - 1) // length} have been handed out"
        problems.add(LayoutMismatch, f"{WHERE}: epochs: {text}", _KEEP)
    problems.raise_if_any()
    progress.waiting = dict.fromkeys(sorted(progress.in_flight))
    return progress


def _contradictions(entry: Mapping[str, Any], order: PromptOrder, progress: Progress) -> Iterator[str]:
    slot, pending = order.slot(entry["epoch"], entry["position"]), entry["pending"]
    name = f"epoch {entry['epoch']}, position {entry['position']}"
    if entry["position"] >= order.epoch_length or slot >= progress.yielded:
        yield f"{name} was never handed out"
    elif order.prompt_id(slot) != entry["prompt_id"]:
        yield f"{name} holds prompt {order.prompt_id(slot)}, found {entry['prompt_id']}"
    if slot in progress.in_flight:
        yield f"{name} appears twice"
    if not pending or len(set(pending)) < len(pending) or max(pending) >= order.group_size:
        yield f"{name}: expected samples below {order.group_size}, each once, found {pending}"
