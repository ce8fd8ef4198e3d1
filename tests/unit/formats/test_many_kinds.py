"""A stranger's header may have as many kinds of layer as layers: what one lacks is looked for among those that share a key with it."""

from __future__ import annotations

import time

from mcore_rlhf.families import complete


def test_a_row_of_all_different_members_is_looked_at_once() -> None:
    """30,000 took a minute: each was compared with each."""
    members = {number: frozenset({f"k{number // 12}.w", f"k{number // 12}.b"}) for number in range(60_000)}
    began = time.process_time()
    assert list(complete._of_row("layers", members)) == []
    assert time.process_time() - began < 10
    members[7] = frozenset({"k0.w"})
    assert list(complete._of_row("layers", members)) == ["layers.7 has no k0.b, and 11 others have"]


def test_a_name_of_a_megabyte_is_of_few_rows() -> None:
    """Each of its numbers was a row of its own, with the name before it and behind it: gigabytes, and minutes."""
    found = complete._rows([f"{'layers.0.' * 100_000}weight"])
    assert len(found) == 16
