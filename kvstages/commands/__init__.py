"""The stages: one file for each, with one Click command named ``command``."""
