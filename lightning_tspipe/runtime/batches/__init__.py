"""Batches on their way to the pipeline: loaders, lookahead, and what ranks hear of them."""
