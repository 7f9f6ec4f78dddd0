"""Which points of a run are among the best by a number, so that they are saved when found."""

from __future__ import annotations

from collections.abc import Sequence

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.retention import About
from evenly.errors import SettingError
from evenly.together import from_first


class Best:
    """Every rank keeps the same list, so that all save at the same points."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder, self._rules = folder, folder.keep
        self._known: dict[int, About] = {}

    def look(self, stages: Sequence[str]) -> None:
        """See what there is, before the run; a meeting of all ranks."""
        stage = self._rules.monitor.partition("/")[0]
        if stage not in ("train", *stages):
            raise SettingError(
                f"Retention looks at {self._rules.monitor!r}, and there is no evaluation of that "
                f"name (there is {', '.join(stages) or 'none'}). Give fit() a validate= set, or "
                "name another: monitor='validation/loss', 'train/loss'."
            )
        self._known = from_first(self._folder.about)

    def found(self, now: About) -> bool:
        """Whether what was measured just now is among the best so far."""
        stage = self._rules.monitor.partition("/")[0]
        seen = [name for name in now.values if name.startswith(f"{stage}/")]
        if seen and self._rules.monitor not in now.values:
            raise SettingError(
                f"Retention looks at {self._rules.monitor!r}, and there is "
                f"{', '.join(map(repr, seen))}. Name one of these in monitor=."
            )
        if not self._rules.wants(now, list(self._known.values())):
            return False
        self._known[now.step] = now
        return True


def best(folder: CheckpointFolder) -> Best | None:
    """None where no rule asks for it."""
    return Best(folder) if folder.keep.best else None
