"""Scores of single units: what a score file is, how shards become a table, and the table that allocators read."""
