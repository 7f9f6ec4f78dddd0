"""Something on one rank only: the others wait, share its value, and raise its error."""

import time

import pytest

import evenly
from evenly.errors import LateError, RankFailedError, SettingError, WorldError
from evenly.testing import run_ranks


def test_alone_a_section_is_just_code(world: evenly.World) -> None:
    with evenly.on_rank(0) as turn:
        assert turn
        turn.share(41)
    assert turn.value == 41

    @evenly.on_rank(0)
    def double(value: int) -> int:
        return 2 * value

    assert double(4) == 8


def test_a_rank_that_does_not_exist_is_refused(world: evenly.World) -> None:
    with pytest.raises(SettingError, match="ranks 0 to 0"), evenly.on_rank(3):
        pass


def sections() -> tuple[list[bool], list[int], int]:
    with evenly.open_world() as world:
        mine, values = [], []
        for rank in range(world.size):
            with evenly.on_rank(rank) as turn:
                mine.append(bool(turn))
                if turn:
                    turn.share(10 * world.rank)
            values.append(turn.value)

        @evenly.on_rank(1)
        def who() -> int:
            return world.rank

        return mine, values, who()


def test_each_section_runs_on_its_rank_and_its_value_reaches_all() -> None:
    for rank, (mine, values, decorated) in enumerate(run_ranks(sections, 3)):
        assert mine == [rank == r for r in range(3)]
        assert values == [0, 10, 20]
        assert decorated == 1


class OddError(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing(kind: str) -> tuple[str, str, str]:
    with evenly.open_world():
        try:
            with evenly.on_rank(0) as turn:
                if turn:
                    raise FileNotFoundError("no such data") if kind == "plain" else OddError(1, 2)
        except Exception as error:
            return type(error).__name__, str(error), "".join(getattr(error, "__notes__", []))
    return "", "", ""


def test_an_error_in_a_section_is_raised_on_every_rank_as_itself() -> None:
    first, *others = run_ranks(failing, 3, "plain")
    assert first[:2] == ("FileNotFoundError", "no such data")
    for name, text, notes in others:
        assert (name, text) == first[:2]
        assert "raised on rank 0" in notes
        assert "test_turn.py" in notes


def test_an_error_that_cannot_travel_is_still_told_to_every_rank() -> None:
    first, *others = run_ranks(failing, 2, "odd")
    assert first[0] == "OddError"
    assert others[0][0] == RankFailedError.__name__
    assert "1 and 2" in others[0][1]


def slow_section() -> str:
    with evenly.open_world():
        try:
            with evenly.on_rank(0, timeout=1.0) as turn:
                if turn:
                    time.sleep(2.5)
        except LateError as error:
            return str(error)
    return ""


def test_the_wait_for_a_section_has_a_limit_that_names_rank_and_place() -> None:
    first, second = run_ranks(slow_section, 2)
    assert first == ""
    assert "rank 0 has not finished its section at" in second
    assert "test_turn.py" in second


def different_branches() -> str:
    with evenly.open_world() as world:
        try:
            if world.rank == 0:
                with evenly.on_rank(0):
                    pass
            else:
                with evenly.on_rank(0):
                    pass
        except WorldError as error:
            return str(error)
    return ""


def test_ranks_that_take_different_branches_are_told() -> None:
    assert "took different branches" in run_ranks(different_branches, 2)[1]


def collective_inside() -> str:
    try:
        with evenly.open_world():
            with evenly.on_rank(0) as turn:
                if turn:
                    evenly.barrier()
    except WorldError as error:
        return str(error)
    return ""


def test_a_collective_inside_a_section_is_refused_at_once() -> None:
    for text in run_ranks(collective_inside, 2):
        assert "barrier inside on_rank() or a callback" in text


def different_choice() -> str:
    try:
        with evenly.open_world(timeout=20) as world, evenly.on_rank(world.rank % 2) as turn:
            if turn:
                turn.share(world.rank)
    except (WorldError, RankFailedError) as error:
        return str(error)
    return ""


def test_ranks_that_choose_different_ranks_are_told() -> None:
    assert any("chose different ranks" in text for text in run_ranks(different_choice, 3))


def large_value() -> int:
    with evenly.open_world():
        with evenly.on_rank(0) as turn:
            if turn:
                turn.share(b"x" * 20_000_000)
        return len(turn.value)


def test_a_shared_value_may_be_large() -> None:
    assert run_ranks(large_value, 3) == [20_000_000] * 3


def leaves_instead() -> str:
    try:
        with evenly.open_world(timeout=30) as world:
            if world.rank != 0:
                with evenly.on_rank(0):
                    pass
    except LateError as error:
        return str(error)
    return ""


def test_a_wait_for_a_rank_that_left_ends_at_once() -> None:
    begin = time.monotonic()
    assert "rank 0 left the world" in run_ranks(leaves_instead, 2)[1]
    assert time.monotonic() - begin < 25


def unsendable() -> str:
    with evenly.open_world():
        try:
            evenly.on_rank(0)(lambda: (i for i in range(3)))()
        except SettingError as error:
            return str(error)
    return ""


def test_a_value_that_cannot_travel_is_refused_on_every_rank() -> None:
    for text in run_ranks(unsendable, 2):
        assert "cannot be sent to the other ranks" in text
