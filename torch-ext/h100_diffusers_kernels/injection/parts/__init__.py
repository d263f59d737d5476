"""Parts that families share: norms, linear layers, streams of tokens, positions, single modules."""
