"""P-5: the solver, against networkx."""

import random

import networkx
import pytest

from foregrad.partition.min_cut import INFINITE, Network


@pytest.mark.parametrize("seed", range(40))
def test_flow_and_cuts_are_those_of_networkx(seed):
    """P-5"""
    draw = random.Random(seed)
    count = draw.randint(2, 25)
    network, oracle = Network(count), networkx.DiGraph()
    oracle.add_nodes_from(range(count))
    capacities = {}
    for _ in range(draw.randint(1, 4 * count)):
        tail, head = draw.sample(range(count), 2)
        capacity = draw.choice([0, 1, 5, 2**33 + draw.randint(0, 9), 2**70])
        network.edge(tail, head, capacity)
        capacities[tail, head] = capacities.get((tail, head), 0) + capacity
    for (tail, head), capacity in capacities.items():
        oracle.add_edge(tail, head, capacity=capacity)
    flow = network.maximum_flow(0, count - 1)
    assert flow == networkx.maximum_flow_value(oracle, 0, count - 1)
    near, far = network.reached_from(0), set(range(count)) - network.reaching(count - 1)
    assert near <= far
    for side in (near, far):
        assert flow == sum(c for (tail, head), c in capacities.items() if tail in side and head not in side)


def test_a_flow_that_nothing_bounds_is_said_to_be_infinite():
    """P-5"""
    network = Network(3)
    network.edge(0, 1, INFINITE)
    network.edge(1, 2, INFINITE)
    assert network.maximum_flow(0, 2) >= INFINITE
