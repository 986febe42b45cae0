"""Ways of training that differ from a chain of stages."""
