"""What every store must keep: suites of tests, to be inherited by the tests of a store.

Example:
    >>> import pytest
    >>> from postroom.testing.contracts import StoreContract, StoreHarness
    >>> class TestMyStore(StoreContract):
    ...     @pytest.fixture
    ...     async def harness(self):
    ...         harness = MyHarness()  # a StoreHarness on an empty store
    ...         await harness.store.open()
    ...         yield harness
    ...         await harness.close()

The tests are coroutines: run them with pytest-asyncio in auto mode, or mark the class with ``pytest.mark.asyncio``.
"""

from __future__ import annotations

from .adding import AddingContract
from .choosing import ChoosingContract
from .claiming import ClaimingContract
from .harness import StoredRow, StoreHarness
from .ordering import OrderingContract
from .parking import ParkingContract
from .peeking import PeekingContract
from .settling import SettlingContract
from .upkeep import UpkeepContract

__all__ = ["StoreContract", "StoreHarness", "StoredRow"]


class StoreContract(
    AddingContract,
    ClaimingContract,
    ChoosingContract,
    PeekingContract,
    SettlingContract,
    OrderingContract,
    ParkingContract,
    UpkeepContract,
):
    """Everything that `postroom.store.Store` promises; a subclass gives the ``harness`` fixture."""
