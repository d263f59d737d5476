"""FP8: linear layers, their weights, the choice of layers, adapters on them."""
