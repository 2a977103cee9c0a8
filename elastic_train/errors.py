"""Every error a user can meet, with the exit code its command ends with."""


class ElasticTrainError(Exception):
    """Base of all errors raised on purpose. The message says what happened, the evidence, and what to do."""

    exit_code = 1


class UsageError(ElasticTrainError):
    """Bad usage, config or recipe; found before any worker starts."""

    exit_code = 2


class UserCodeError(ElasticTrainError):
    """The user's code failed on every worker at the same place."""

    exit_code = 3


class NonFiniteError(UserCodeError):
    """A step's gradient or loss is not finite, and the policy's budget is spent."""


class StateLostError(ElasticTrainError):
    """A worker's state is not to be had: what computed it has failed on the device."""


class GaveUpError(ElasticTrainError):
    """The restart budget is spent, or the floor was never reached."""

    exit_code = 4


class StatesDifferError(GaveUpError):
    """The members hold different states, and no majority says which is right."""


class InterruptedByUser(ElasticTrainError):
    """The job was asked to stop and has done so: after a commit, or at once if it was asked again."""

    exit_code = 130


# Exit codes of worker processes. Only the agent and the coordinator see them.

EXIT_USER_CODE = 13
"""The worker's own code raised before it was ready, or keeps raising."""

EXIT_REJOIN = 75
"""What the worker holds is out of date, or it cannot go on with the group; it wants to be started again as new."""

EXIT_LOST = 76
"""The worker lost the coordinator, and has left no state."""

EXIT_CARRIED = 78
"""The worker lost the coordinator, and has left its state with the agent."""


def as_utf8(text: str) -> str:
    """`text` as UTF-8 can hold it. Python makes lone surrogates of what is no UTF-8, such as names of files, and none
    of them can be sent or written.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def last_error(traceback: str) -> str:
    """The line of a traceback that names the exception; of chained ones, the last.

    >>> last_error("Traceback (most recent call last):\\n  File x\\nValueError: no\\nin shard 3")
    'ValueError: no'
    """
    lines = traceback.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
    return next((line for line in lines if not line.startswith(" ")), "")
