"""Adapters beside their base: in Megatron-Bridge's names, merged into the weights, and the base's fingerprint."""
