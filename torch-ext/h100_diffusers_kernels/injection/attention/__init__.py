"""Attention: the modules of families, processors of other models, the backend of diffusers."""
