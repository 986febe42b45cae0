"""Training and evaluation steps in the hooks of Lightning."""
