"""Where results come from: code, environment, manifest, and whether results are still what they were."""
