"""Networks cut into stages: what a rank runs of them, and what flows between them."""
