"""The engine that computes: continuous batching of one base model and many adapters."""

from services.replica.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
