"""What a YAML text may cost before it is loaded: PyYAML recurses into brackets, and a few aliases can stand for billions of values."""

from __future__ import annotations

MAX_NBYTES = 4 << 20
"""No settings are longer."""

MAX_DEPTH = 50
MAX_VALUES = 200_000


def check_yaml(text: str) -> None:
    """Look through a text, without making values of it.

    Args:
        text: YAML.

    Raises:
        yaml.YAMLError: It is none, is nested too deeply, or has too many values when every alias is followed.
    """
    import yaml

    values = 0
    begun: list[tuple[str | None, int]] = []
    weights: dict[str, int] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        values += 1
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, values))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = begun.pop()
            if anchor is not None:
                weights[anchor] = values - start
        elif isinstance(event, yaml.AliasEvent):
            values += weights.get(str(event.anchor), 0)
        if len(begun) > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep")
        if values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, those behind aliases counted each time")
