"""Networks as chains of atoms: recorded, cut, and run."""
