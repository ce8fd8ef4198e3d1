"""From one family of names to the other: a source is shown to a target under the target's names, and no format knows another."""

from .families import alike as alike
from .families import crossed as crossed
