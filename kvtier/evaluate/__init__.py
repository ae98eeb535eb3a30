"""How much a page format and a recipe change what a model says: `kvtier eval`."""

from kvtier.evaluate.run import Evaluation, EvaluationOptions, evaluate

__all__ = ["Evaluation", "EvaluationOptions", "evaluate"]
