"""The command ``tspipe``: plan a pipeline, look at plans and at recorded runs."""
