"""Networks as chains of atoms: cut, run, and go backward in halves."""
