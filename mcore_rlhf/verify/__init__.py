"""Proving things about checkpoints: checksums, equal replicas, masters that agree with parameters, equal states."""
