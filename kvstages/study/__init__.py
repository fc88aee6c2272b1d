"""A study: its configuration, artifacts, text and windows."""
