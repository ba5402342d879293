"""Tessera's caches in PyTorch and in Hugging Face transformers: see README.md."""
from . import versions
from .build import Policy, methods, parameters
from .cache import TesseraCache
from .captured import CapturedStep
from .kinds.devices import layer_devices
from .pages import PagedLayer, PageOperations

__all__ = ["CapturedStep", "PagedLayer", "PageOperations", "Policy", "TesseraCache", "layer_devices", "methods", "parameters",
           "versions"]
