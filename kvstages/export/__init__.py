"""Engines: what each can express of a policy, in its own words and with its own quantizer. One engine a file."""
