"""Weights of a pruned group in which candidates failed (ARRoL does not consider failures)."""

from collections.abc import Sequence

import numpy as np


def weight_factor(survivals: Sequence[float], started: int) -> float:
    """Return what the weights 1 / survival of a group are multiplied by where candidates failed.

    ``inf`` if that exceeds the range of floats.

    A candidate that was pruned might have failed later, and one that failed might have been pruned. So the candidates
    that count, all n that were started without the f that are known to have failed, are more than those that would not
    have failed, for which the weights 1 / survival of the survivors stand: weighted means come out too small.

    Let a set D of d of n candidates be doomed to fail at some time, all sets of that size alike: failures do not depend
    on what is generated. Given D, with W = 1 / survival until a candidate ended, and 0 for a pruned one,

    * E[W_i x_i] = x_i, and the product of the W of several candidates has expectation 1: each decision keeps it;
    * so the sum of x over all n, which is n / (n - d) times that over those outside D on average over D, is the
      expectation of g(d) * (sum of W_i x_i over the survivors) with g(d) = n / (n - d);
    * g(d) = sum over k of C(d, k) / C(n - 1, k), its Newton series, and C(d, k) is the expectation of e_k, the sum over
      all k of the failed of the product of their W. Those are other candidates than i, so the products keep their
      expectation.

    Hence each weight 1 / survival times the sum over k of e_k / C(n - 1, k) estimates sums over all n without bias, and
    times (n - f) / n sums over n - f candidates, the number that is reported. Without pruning all of it is 1.

    (n minus the sum of W over the failed estimates n - d without bias, but not its inverse; and it may be negative.)

    It is exact for a fixed number of candidates: if failures left too few, and others were started in place of them, it
    is an estimate.

    Args:
        survivals: of the candidates that failed, fewer than ``started``.
        started: n, with them.
    """
    kept = [survival for survival in survivals if survival < 1]
    k = np.arange(1, len(survivals) + 1)
    others = started - k  # C(n - 1, k) / C(n - 1, k - 1) is others / k
    # The terms e_k / C(n - 1, k) of the candidates so far, first of all with survival 1, for which e_k is a binomial
    # coefficient. Neither e_k nor C(n - 1, k) alone is in the range of floats.
    certain = len(survivals) - len(kept)
    terms = np.cumprod(np.concatenate([[1.0], np.maximum(certain + 1 - k, 0) / others]))
    with np.errstate(over="ignore"):
        for survival in kept:
            terms[1:] += terms[:-1] * (k / others) / survival
        return float(terms.sum()) * (started - len(survivals)) / started
