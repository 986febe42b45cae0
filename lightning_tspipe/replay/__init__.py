"""Replay: a captured step is run again, with what its networks give in their place."""
