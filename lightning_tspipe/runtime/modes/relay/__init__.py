"""Blockwise distillation: blocks beside blocks, relayed from rank to rank."""
