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


class GaveUpError(ElasticTrainError):
    """The restart budget is spent, or the floor was never reached."""

    exit_code = 4


class InterruptedByUser(ElasticTrainError):
    """The job was asked to stop and has done so after a commit."""

    exit_code = 130
