"""Planning: cuts, placement and micro-batches of a pipeline. Pure Python."""
