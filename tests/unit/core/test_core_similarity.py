"""The cosines between the outer gradients of a round, from their inner products."""

import torch

from diloco.core.merging import cosines, inner_products, num_products


def test_every_pair_has_its_cosine() -> None:
    x, y, z = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([-2.0, 0.0])
    products = inner_products([x, y, z])
    assert len(products) == num_products(3)
    assert cosines([4, 5, 9], products.tolist()) == [(4, 5, 0.7071), (4, 9, -1.0), (5, 9, -0.7071)]


def test_one_contributor_has_no_pair() -> None:
    assert cosines([3], inner_products([torch.ones(4)]).tolist()) == []


def test_a_contribution_of_zeros_has_no_cosine_and_unknown_products_give_none() -> None:
    products = inner_products([torch.ones(4), torch.zeros(4), -torch.ones(4)])
    assert cosines([0, 1, 2], products.tolist()) == [(0, 2, -1.0)]
    assert cosines([0, 1, 2], ()) == []
    assert cosines([0, 1], [float("nan"), 1.0, 1.0]) == [] == cosines([0, 1], [1.0, float("inf"), 1.0])
