"""Model -> ModelGraph."""

from autoshard.analyzer._constants import evaluate_constants

__all__ = ["evaluate_constants"]
