"""Planning: where to cut, who holds what, how many micro-batches. Pure Python."""
