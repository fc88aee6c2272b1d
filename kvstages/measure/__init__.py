"""Measuring and training: everything that runs a decoder."""
