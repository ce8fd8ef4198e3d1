"""Conversions between families of formats: Megatron's names and shapes, and Hugging Face's, which all others store.

The source is wrapped in one of the target's family: its catalogue is a view with other names and boxes, its groups and
arguments are derived, and the target's format never learns of it. When which way is gone: :mod:`mcore_rlhf.families.passes`.
"""
