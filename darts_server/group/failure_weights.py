"""Weights of a pruned group with failed candidates (ARRoL does not consider failures)."""

from collections.abc import Sequence

import numpy as np


def weight_factor(survivals: Sequence[float], started: int) -> float:
    """Return the factor on the weights 1 / survival of a group with failures, ``inf`` beyond the range of floats.

    The reported number of candidates is n - f: all n that were started without the f that failed. It is too large for
    these weights, because some pruned candidates would have failed later: weighted means would be too small.

    Let d of the n candidates be doomed to fail, all sets of this size equally likely. Let W_i be 1 / survival until
    candidate i ended, and 0 if it was pruned. Given the doomed set,

    * E[W_i x_i] = x_i, and the product of the W of several candidates has expectation 1, because every decision keeps
      the expectation;
    * on average over doomed sets, the sum of x over all n is g(d) = n / (n - d) times the sum over the candidates that
      are not doomed, so it is the expectation of g(d) * (sum of W_i x_i over the survivors);
    * the Newton series of g(d) is the sum over k of C(d, k) / C(n - 1, k), and C(d, k) is the expectation of e_k, the
      sum over all sets of k failed candidates of the products of their W. Candidate i is in none of these sets.

    Hence 1 / survival times the sum over k of e_k / C(n - 1, k) estimates sums over all n without bias, and times
    (n - f) / n sums over n - f candidates. Without pruning the factor is 1. It is exact for a fixed number of
    candidates, and an estimate if failed candidates were replaced.

    Args:
        survivals: survival of each failed candidate, fewer than ``started``.
        started: n.
    """
    pruned_survivals = [survival for survival in survivals if survival < 1]
    k = np.arange(1, len(survivals) + 1)
    # C(n - 1, k) / C(n - 1, k - 1) is others / k.
    others = started - k

    # The terms e_k / C(n - 1, k) of the candidates with survival 1, for which e_k is a binomial coefficient. Neither
    # e_k nor C(n - 1, k) alone is in the range of floats.
    certain = len(survivals) - len(pruned_survivals)
    terms = np.cumprod(np.concatenate([[1.0], np.maximum(certain + 1 - k, 0) / others]))

    # Add the other candidates one by one.
    with np.errstate(over="ignore"):
        for survival in pruned_survivals:
            terms[1:] += terms[:-1] * (k / others) / survival
        return float(terms.sum()) * (started - len(survivals)) / started
