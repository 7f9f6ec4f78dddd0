"""Every error a user of Evenly can meet.

::

    EvenlyError
    ├── SettingError          an argument or option makes no sense (also a ValueError)
    ├── WorldError            the group of processes is not what it should be
    │   ├── NoWorldError      something needs an open world and there is none
    │   ├── VariablesError    the launcher's variables contradict each other
    │   ├── DeviceError       devices cannot be given out to the ranks as asked
    │   ├── DisagreementError ranks were meant to hold the same value and do not
    │   ├── LateError         some ranks did not arrive in time; it names them
    │   ├── LostError         a rank ended without a word while others waited for it
    │   └── RankFailedError   another rank raised; its message and traceback are attached
    ├── DataError             a data set cannot be read as asked
    │   ├── SampleError       fetching one sample raised; it names the index
    │   └── CollateError      samples could not be put into a batch; it names the indices
    ├── StorageError          files could not be written, or are not what they should be
    │   └── FormatError       they are of another version, or of something else; none is touched
    ├── TrainingError         training cannot go on
    │   └── LossError         the loss is no number to train on; it names the step
    └── LaunchError           processes could not be started, or one of them failed

    EvenlyWarning             the run goes on, but its numbers depend on something (a UserWarning)
"""

from collections.abc import Sequence


class EvenlyError(Exception):
    """Base of all errors that Evenly raises on purpose."""

    agreed = False
    """Whether every rank raises it at the same point, so that none is left waiting."""


class SettingError(EvenlyError, ValueError):
    """An argument or option makes no sense; nothing was started."""


class WorldError(EvenlyError):
    """The group of processes is not what it should be."""


class NoWorldError(WorldError):
    """Something needs an open world and there is none."""


class VariablesError(WorldError):
    """The launcher's environment variables contradict each other or are incomplete."""


class DeviceError(WorldError):
    """Devices cannot be given out to the ranks as asked."""


class DisagreementError(WorldError):
    """Ranks were meant to hold the same value and do not. Raised on every rank."""

    agreed = True


class LateError(WorldError):
    """Some ranks did not arrive within the time allowed."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LostError(WorldError):
    """Contact with another rank was lost and nobody said why (it was probably killed)."""


class RankFailedError(WorldError):
    """Another rank raised. ``rank`` says which, ``traceback`` what it printed."""

    def __init__(self, rank: int, summary: str, traceback: str = "") -> None:
        super().__init__(rank, summary, traceback)
        self.rank = rank
        self.summary = summary
        self.traceback = traceback

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.summary}"


class DataError(EvenlyError):
    """A data set cannot be read as asked."""


class SampleError(DataError):
    """Fetching a sample raised. ``indices`` names it (several for a whole-batch fetch)."""

    def __init__(self, message: str, indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class CollateError(DataError):
    """Samples could not be put into one batch. ``indices`` names them."""

    def __init__(self, message: str, indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class StorageError(EvenlyError):
    """Files could not be written or read, or are not whole."""


class FormatError(StorageError):
    """What is there is whole, perhaps, but of another version or of something else."""


class TrainingError(EvenlyError):
    """Training cannot go on."""


class LossError(TrainingError):
    """The loss is no number to train on: not one number, not finite, or of no weight."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class EvenlyWarning(UserWarning):
    """The run goes on, but its numbers depend on something that the user may not know of."""


class LaunchError(EvenlyError):
    """Processes could not be started, or one of them ended badly."""
