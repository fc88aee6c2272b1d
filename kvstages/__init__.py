"""kvstages: how far can each attention head's KV cache be quantized, and what does it do to the output?"""

__version__ = "0.1.0"
