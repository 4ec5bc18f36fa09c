"""Kinds of modules, and what their forwards do."""
