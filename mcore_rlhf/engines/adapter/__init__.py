"""A LoRA in training: the adapter alone is saved, in peft's own format, with its optimizer beside it.

``engine`` is what the manager drives, ``live_adapter`` what it knows of the model, ``trained`` what the optimizer trains besides.
"""

from .engine import AdapterEngine as AdapterEngine
