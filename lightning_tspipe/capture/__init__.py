"""Capture: which calls a step makes to the pipelined networks, and the step around them."""
