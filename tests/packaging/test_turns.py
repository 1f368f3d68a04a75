"""The files of tests that take turns (tests/turns.py)."""

import os

import pytest
import turns


def test_every_file_has_its_turn(monkeypatch):
    for name in (*turns.EVERY_TIME, *turns.LONGEST):
        assert (turns.TESTS / name).is_file(), name
    assert not {*turns.EVERY_TIME} & {*turns.LONGEST}
    waiting = turns.waiting()
    assert len(waiting) > 10 * turns.TURNS
    monkeypatch.setenv(turns.VARIABLE, "all")
    assert not any(map(turns.is_others, waiting))
    ran = []
    for turn in range(turns.TURNS):
        monkeypatch.setenv(turns.VARIABLE, str(turn))
        assert not turns.is_others(turns.TESTS / "adam" / "test_adam.py")
        assert not turns.is_others(turns.TESTS / turns.EVERY_TIME[0])
        ran += [file for file in waiting if not turns.is_others(file)]
    assert sorted(ran) == sorted(waiting) and len({*ran}) == len(ran)


def test_the_turn_of_a_commit(monkeypatch):
    monkeypatch.setenv(turns.VARIABLE, "2")
    turns.choose(everybody=False)
    assert os.environ[turns.VARIABLE] == "2"  # as asked for
    turns.choose(everybody=True)
    assert os.environ[turns.VARIABLE] == "all"
    monkeypatch.delenv(turns.VARIABLE)
    turns.choose(everybody=False)
    assert int(os.environ[turns.VARIABLE]) in range(turns.TURNS)
    monkeypatch.setenv(turns.VARIABLE, "4")
    with pytest.raises(pytest.UsageError, match="must be 0 to 3, or all, got '4'"):
        turns.choose(everybody=False)
