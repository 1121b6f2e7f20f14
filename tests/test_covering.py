"""The covering arrays that the laws use meet their specification."""

from __future__ import annotations

import pytest

from covering import Case, covering, lacking

SLOTS = [
    [f"{slot}{number}" for number in range(count)] for slot, count in (("a", 5), ("b", 3), ("c", 2), ("d", 4))
]


def any_goes(_: Case) -> bool:
    return True


def some_go(case: Case) -> bool:
    """Return false for two values that exclude each other, and for one value with any d."""
    return not {"a1", "b2"} <= {*case} and not ("c1" in case and any(value[0] == "d" for value in case))


@pytest.mark.parametrize("goes", [any_goes, some_go])
@pytest.mark.parametrize(("together", "times"), [(1, 2), (2, 1), (2, 2)])
def test_each_choice_goes_and_all_that_may_meet_do(goes: object, together: int, times: int) -> None:
    assert callable(goes)
    found = covering(SLOTS, goes, together=together, times=times)
    assert all(goes(case) for case in found)
    assert not lacking(found, SLOTS, goes, together=together, times=times)


def test_an_array_is_small_and_the_same_each_time() -> None:
    found = covering(SLOTS, any_goes, together=2, seed=3)
    assert 20 <= len(found) <= 28
    assert found == covering(SLOTS, any_goes, together=2, seed=3)
    assert len(covering(SLOTS, any_goes)) == 5


def test_what_lacks_is_found() -> None:
    found = covering(SLOTS, some_go, together=2)
    fewer = [case for case in found if not {"a4", "b1"} <= {*case}]
    assert len(fewer) < len(found)
    assert ("a4", "b1") in lacking(fewer, SLOTS, some_go, together=2)
