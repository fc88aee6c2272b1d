"""The KV cache: precisions, the quantizer, and the caches that a decoder hands its keys and values to."""
