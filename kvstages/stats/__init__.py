"""Means, intervals and correlations of measured numbers."""
