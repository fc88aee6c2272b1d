"""How fast the study runs, measured beside a plain implementation in the same run: ``make benchmark``."""
