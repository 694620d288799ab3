"""Every error autofit raises on purpose.

::

    AutofitError
    ├── UsageError      the request is not possible                    (exit code 2)
    ├── ScriptError     the script fails without a plan too            (exit code 1)
    ├── NothingFits     no plan fits the budget                        (exit code 3)
    ├── StorageError    the store cannot be read or written            (exit code 1)
    ├── WorkerError     a worker process failed, not the script        (exit code 1)
    ├── CannotRetry     a retry would not be the same training         (exit code 1)
    └── Refused         a strategy cannot keep its promise here        (a verdict, never an exit)

A message says what was given, what is allowed and what to do, in one line.
"""


class AutofitError(Exception):
    """The root of every error autofit raises on purpose."""

    exit_code = 1


class UsageError(AutofitError):
    """The request is not possible: a bad size, an unknown technique, a missing file."""

    exit_code = 2


class ScriptError(AutofitError):
    """The script fails without a plan too.

    ``traceback`` is what Python itself would have printed (empty when the script raised nothing).
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class NothingFits(AutofitError):
    """No plan fits the budget; the message says what came closest."""

    exit_code = 3


class StorageError(AutofitError):
    """The store cannot be read or written."""


class StoreUnavailable(StorageError):
    """The database does not answer; it may be restarted."""


class WorkerError(AutofitError):
    """A worker process failed, not the script."""


class CannotRetry(AutofitError):
    """Memory ran out, and a retry would not be the same training.

    Its ``__cause__`` is the allocator's own error.
    """


class Refused(AutofitError):
    """A technique would not keep this training the same; the message is the reason.

    ``strategy`` names it, where it is known.
    """

    def __init__(self, reason: str, strategy: str | None = None) -> None:
        super().__init__(reason)
        self.strategy = strategy
