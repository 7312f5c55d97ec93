"""Operators for hybrid language models, each with a plain torch reference that defines it."""
