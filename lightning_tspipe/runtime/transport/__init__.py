"""Messages between ranks: what carries tensors and objects."""
