"""The exceptions that reach users. Each message is one sentence: the value, what is allowed, and what to do."""


class DFlashError(Exception):
    """Base of every error that `dflash_jax` raises on purpose."""


class ConfigError(DFlashError, ValueError):
    """A `config.json`, a drafter that does not fit its target, or an option of `LLM` is wrong."""


class CheckpointError(DFlashError, ValueError):
    """A model folder, or a tensor in it, is missing, surplus, misshaped or damaged."""


class RequestError(DFlashError, ValueError):
    """A prompt or its sampling parameters cannot be served."""


class EngineDeadError(DFlashError, RuntimeError):
    """The engine has failed for good or was closed; start it again to serve requests."""


class QueueFullError(DFlashError, RuntimeError):
    """The queue of waiting requests is full; the same request can be served later."""


class ProgramLimitError(DFlashError, RuntimeError):
    """The process cannot hold another compiled program."""
