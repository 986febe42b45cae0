"""Language models as teachers and students: their loss, kept targets, and their weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
