"""Tessera's caches in PyTorch and in Hugging Face transformers: see README.md."""
from .build import Policy, methods, parameters
from .cache import TesseraCache

__all__ = ["Policy", "TesseraCache", "methods", "parameters"]
