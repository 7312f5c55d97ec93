"""The exception types of this package. Each text names the option or object, the value seen and the bound."""

__all__ = ["CheckpointError", "ConfigError", "OptionError"]


class OptionError(ValueError):
    """An option out of its range, or one that the model or the machine leaves no room for."""


class ConfigError(ValueError):
    """A config.json that describes no model this program can run."""


class CheckpointError(ValueError):
    """Weight files that are missing, damaged, or do not fit the model's config."""
