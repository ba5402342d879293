"""Tessera's caches in PyTorch and in Hugging Face transformers: see README.md."""
from .build import Policy, methods, parameters
from .cache import TesseraCache
from .captured import CapturedStep

__all__ = ["CapturedStep", "Policy", "TesseraCache", "methods", "parameters"]
