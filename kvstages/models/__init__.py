"""Decoders, their shapes and their checkpoints."""
