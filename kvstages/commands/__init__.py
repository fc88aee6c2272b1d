"""One file a stage; each holds one Click command named ``command``."""
