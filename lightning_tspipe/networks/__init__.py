"""Networks as chains of atoms: cut, run, profile, and go backward in halves."""
