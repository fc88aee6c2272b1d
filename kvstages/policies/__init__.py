"""Policies: which precision each unit gets under a budget, and their records."""
