"""Other frameworks that start a pipeline's ranks; each module needs an extra of its own."""
