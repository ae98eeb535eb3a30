"""Recipes for one model, from what its layers do with ordinary texts: `kvtier calibrate`."""

from kvtier.calibrate.moments import Moments, collect_moments
from kvtier.calibrate.rotation import Rotation, rotations_of
from kvtier.calibrate.run import run_calibration
from kvtier.calibrate.solve import solve_recipe
from kvtier.calibrate.texts import Texts, read_texts, tokenize_texts

__all__ = [
    "Moments",
    "Rotation",
    "Texts",
    "collect_moments",
    "read_texts",
    "rotations_of",
    "run_calibration",
    "solve_recipe",
    "tokenize_texts",
]
