"""The one source of pseudo-random choices outside of weights: a hash of integers, equal on every machine.

    state <- finalise(state + number + golden)   for each number in turn, from state 0

with the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit numbers: single numbers never
collide. Plain integer arithmetic, so no version of any library changes an order or a sample drawn with it.
"""

import numpy as np
from numpy.typing import NDArray


def mix(*numbers: NDArray[np.int64] | NDArray[np.uint64] | np.uint64 | int) -> NDArray[np.uint64]:
    """A pseudo-random 64-bit number for each tuple of integers; arrays are combined entry by entry."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = state + np.asarray(number).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
