"""One device: its weights, its expert FFNs, the expert call and the daemon's life.

Knows nothing of routing, prompts or other nodes. Imports `relay` and `market`.
"""
