"""The ways of training, each a final class: what they are asked is in ``execution.engine``."""
