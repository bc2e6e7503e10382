"""Weights of a pruned group with failed candidates (ARRoL does not consider failures)."""

from collections.abc import Sequence

import numpy as np


def failure_weight_factor(failed_survivals: Sequence[float], num_started: int) -> float:
    """Return the factor on the weights 1 / survival of a group with failures, ``inf`` beyond the range of floats.

    Of n started candidates, f failed. Without the factor weighted means would be too small, because some pruned
    candidates would have failed later.

    Let d of the n candidates be doomed to fail, all sets of this size equally likely. Let W_i be 1 / survival until
    candidate i ended, and 0 if it was pruned. Given the doomed set,

    * every decision keeps the expectation, so E[W_i x_i] = x_i, and products of the W of several candidates have
      expectation 1;
    * on average over doomed sets, the sum of x over all n is g(d) = n / (n - d) times the sum over the candidates that
      are not doomed, so it is the expectation of g(d) * (sum of W_i x_i over the survivors);
    * the Newton series of g(d) is the sum over k of C(d, k) / C(n - 1, k), and C(d, k) is the expectation of e_k, the
      sum over all sets of k failed candidates of the products of their W. Candidate i is in none of these sets.

    Hence 1 / survival times the sum over k of e_k / C(n - 1, k) estimates sums over all n without bias, and times
    (n - f) / n sums over the candidates that did not fail. Without pruning the factor is 1. It is exact for a fixed
    number of candidates, and an estimate if failed candidates were replaced.
    """
    num_failed = len(failed_survivals)
    uncertain_survivals = [survival for survival in failed_survivals if survival < 1]
    num_certain = num_failed - len(uncertain_survivals)

    # terms[k] is e_k / C(n - 1, k). Neither alone is in the range of floats, so ratios of neighbours are multiplied.
    k = np.arange(1, num_failed + 1)
    binomial_ratios = (num_started - k) / k

    # With the certain candidates alone, e_k is C(num_certain, k).
    ratios = np.maximum(num_certain + 1 - k, 0) / k / binomial_ratios
    terms = np.cumprod(np.concatenate([[1.0], ratios]))

    # Another candidate is in a set of k, or it is not: e_k grows by e_(k-1) / survival.
    with np.errstate(over="ignore"):
        for survival in uncertain_survivals:
            terms[1:] += terms[:-1] / binomial_ratios / survival
        scale_to_started = float(terms.sum())
    return scale_to_started * (num_started - num_failed) / num_started
