"""The command ``tspipe``: plan a pipeline, inspect plans and recorded runs."""
