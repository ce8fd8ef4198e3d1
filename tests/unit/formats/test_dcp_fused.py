"""How many groups of heads lie in a fused parameter is a stranger's word: a number that the tensors cannot have is not counted to."""

from __future__ import annotations

import pytest

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.formats.dcp.fused import FusedParam

HEADS = ((8, 8), (4, 8), (4, 8))


@pytest.mark.parametrize(
    ("groups", "shapes", "fits"),
    [(2, HEADS, True), (3, HEADS, False), (0, HEADS, False), (10**18, ((0, 8),) * 3, False), (2, ((),) * 3, False)],
)
def test_groups_of_heads(groups: int, shapes: tuple[Shape, ...], fits: bool) -> None:
    assert FusedParam("wqkv", dict(zip(("wq", "wk", "wv"), shapes, strict=True)), groups).fits is fits
