"""What a seam of somebody else's trainer has to look like, checked when we are attached to it and not when the first step is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from typing import Any, TypeVar

from mcore_rlhf.errors import Problems, Unsupported, log_of

LOG = log_of("mcore_rlhf.integrations")
T = TypeVar("T")
OURS = "_mcore_rlhf"
"""The attribute of a class that is changed, and of its objects."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Methods of a trainer that we stand around, as they were when this was written.

    Args:
        package: The distribution that they are of.
        tried: The version that they were read in, and run with.
        methods: Of each the names of its parameters, without ``self``; further ones must have defaults.
    """

    package: str
    tried: str
    methods: Mapping[str, tuple[str, ...]]

    @property
    def installed(self) -> str:
        """The version that is installed, or that nobody knows."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "an unknown version"

    def check(self, owner: object) -> None:
        """See that a trainer's class, or module, has what we stand around.

        Raises:
            Unsupported: It has not; every method that differs is named, with what was expected.
        """
        problems, name = Problems(), getattr(owner, "__name__", type(owner).__name__)
        for method, expected in self.methods.items():
            found = getattr(owner, method, None)
            if not callable(found):
                problems.add(Unsupported, f"{name}.{method}({', '.join(expected)}): is not there", self._advice)
            elif why := _difference(found, expected):
                problems.add(
                    Unsupported, f"{name}.{method}: expected ({', '.join(expected)}), found {why}", self._advice
                )
        problems.raise_if_any()
        if self.installed != self.tried:
            LOG.info("%s %s: the seam is as in %s, with which this was run", self.package, self.installed, self.tried)

    def attach(self, owner: Any, options: object, around: Callable[[Any], Mapping[str, Callable[..., Any]]]) -> None:
        """Have a trainer's class call what stands around its methods; a second time it is given other options only.

        Args:
            owner: The class, which is changed.
            options: What :func:`kept_with` makes what it keeps of.
            around: What stands around the class' own methods, by name.

        Raises:
            Unsupported: See :meth:`check`.
        """
        if not hasattr(owner, OURS):
            self.check(owner)
            for name, method in around(owner).items():
                setattr(owner, name, method)
        setattr(owner, OURS, options)

    @property
    def _advice(self) -> str:
        return (
            f"This is {self.package} {self.installed}; the seam was read in, and run with, {self.tried}. Install that one, or train "
            "without this package's manager: nothing was changed."
        )


def _difference(found: Callable[..., object], expected: tuple[str, ...]) -> str:
    """What a method takes, where that is not what is expected; empty where it is."""
    parameters = [one for one in signature(found).parameters.values() if one.name != "self"]
    names = tuple(one.name for one in parameters)
    more = [one for one in parameters if one.name not in expected]
    fits = all(one.default is not Parameter.empty or one.kind in _REST for one in more)
    return "" if names[: len(expected)] == expected and fits else f"({', '.join(names)})"


def kept_with(trainer: Any, make: Callable[[Any], T]) -> T:
    """What we keep with a trainer.

    Args:
        trainer: An object of a class that :meth:`Seam.attach` has changed.
        make: Makes it of the options, when it is asked for first.
    """
    if OURS not in vars(trainer):
        setattr(trainer, OURS, make(getattr(type(trainer), OURS)))
    found: T = vars(trainer)[OURS]
    return found


@contextmanager
def temporarily(settings: Any, values: Mapping[str, object]) -> Iterator[None]:
    """Have a trainer's settings be others for a while.

    Args:
        settings: Any object; a setting that it has not is None again afterwards.
        values: By name.
    """
    before = {name: getattr(settings, name, None) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
