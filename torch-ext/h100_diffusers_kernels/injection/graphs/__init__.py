"""CUDA graphs of whole models."""
