"""Recipes that were calibrated with `kvtier calibrate` and come with kvtier, one file a model."""
