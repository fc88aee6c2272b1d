"""Provenance: code, environment and manifest of results, and checks that results are still what they were."""
