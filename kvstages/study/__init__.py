"""A study: its configuration, files, artifacts, text and windows."""
