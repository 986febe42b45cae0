"""Ends of a run: failures and signals."""
