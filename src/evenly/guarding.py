"""Around whatever ranks do together: if it fails on one of them, nobody is left waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from evenly.blame import blame
from evenly.checkpoint.saving import Saver
from evenly.errors import LostError, RankFailedError
from evenly.loader import Loader
from evenly.world import World


@contextlib.contextmanager
def guarded(
    world: World,
    loaders: Sequence[Loader] = (),
    *,
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[None]:
    """Close the loaders at the end; tell the other ranks about an error, and leave the world.

    An error that all ranks raise at the same point leaves nobody waiting, and the world as it is.
    """
    try:
        yield
    except BaseException as error:
        on_error(error)
        if not getattr(error, "agreed", False):
            _leave(world, error)
        raise
    finally:
        for loader in loaders:
            loader.close()


@contextlib.contextmanager
def finishing(saver: Saver | None) -> Iterator[None]:
    """Give the last save time to finish, also after an error; but not where a rank died without a
    word, whose share will never come.
    """
    gone = False
    try:
        yield
    except BaseException as error:
        told = isinstance(error, RankFailedError) and LostError.__name__ in error.summary
        gone = told or blame(error) == "lost"
        raise
    finally:
        if saver is not None and not gone:
            saver.close()


def _leave(world: World, error: BaseException) -> None:
    """Others wait for this rank: tell them why, and end the waits that only this ends."""
    try:
        world.fail(error)
    finally:
        if world.size > 1:
            world.abandon()
