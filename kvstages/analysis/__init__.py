"""What measured numbers say: comparisons, additivity, predictions, and the published figures."""
