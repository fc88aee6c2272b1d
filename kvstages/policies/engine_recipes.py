"""Names of the recipes of a set of policies for engines: one of its own, and for each engine several after its name."""

# The policy itself; after an engine's name, its allocator at the bytes of what is projected.
OWN = "own"
# What the policy becomes in the engine; it is also the allocator that its record names.
PROJECTED = "projected"
# The least proxy at the bytes of that: of what the engine can express, and of any of its formats for each layer.
ALLOCATED, EVERY_LAYER = "allocated", "layer"
# The least proxy that the engine can express at the bytes of the policy itself.
AT_OWN_BYTES = "allocated-own"
