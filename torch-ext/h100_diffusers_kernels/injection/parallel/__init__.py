"""Several GPUs: the exchange of tokens between ranks, and plans for models."""
