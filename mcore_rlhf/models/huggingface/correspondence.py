"""Which parts two sets of tensors have in common: links between boxes, computed once, read both ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rlhf.core.box import Box
from mcore_rlhf.core.views import Share


@dataclass(frozen=True, slots=True)
class Link:
    """A part that two tensors have in common.

    Args:
        huggingface: A tensor as it lies on disk, under Hugging Face's names.
        huggingface_box: A box in it.
        other: A tensor under other names.
        other_box: A box in that, with the same elements.
        axes: For every dimension of the first box, the dimension of the second that it is; None where all are the same.
    """

    huggingface: str
    huggingface_box: Box
    other: str
    other_box: Box
    axes: tuple[int, ...] | None = None

    @property
    def share(self) -> Share:
        """Hugging Face's part of it."""
        return Share(self.huggingface_box, self.other, self.other_box, self.axes)


def shares_of_huggingface(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every Hugging Face tensor, in order, the parts of the others that it is made of."""
    return _by_name(names, ((link.huggingface, link.share) for link in links))


def shares_of_others(names: Iterable[str], links: Iterable[Link]) -> dict[str, tuple[Share, ...]]:
    """For every other tensor, in order, the parts of Hugging Face's that it is made of."""
    shares = ((link.other, link.share.inverse(link.huggingface)) for link in links)
    return _by_name(names, shares)


def _by_name(names: Iterable[str], shares: Iterable[tuple[str, Share]]) -> dict[str, tuple[Share, ...]]:
    found: dict[str, list[Share]] = {name: [] for name in names}
    for name, share in shares:
        found[name].append(share)
    return {name: tuple(listed) for name, listed in found.items()}
