"""Choose the replica of each request."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from darts_server.exceptions import NoReplica
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.routing.affinity import MIN_PREFIX, Affinity, PromptAffinity
from darts_server.ingress.routing.lengths import ExpectedLengths, generated_tokens
from darts_server.ingress.routing.terms import Terms, digest
from darts_server.rollout.turns import Hashes, TokenIndex, hash_of

RETRY_SECONDS = 5
"""``Retry-After`` while no replica serves: a few polls."""
KEPT_HOMES = 1 << 18
"""Prompts that a replica has statistics of: those of a data set."""


class Router:
    """Choose replicas.

    * A later turn goes to the replica that has its prefix: by its session, else by the longest known prompt that its
      own begins with.
    * Single requests that may form a group meet: by its name, else by their prompt.
    * A prompt with a key of the caller's stays where its statistics are.
    * All else goes to the replica on which the fewest tokens are expected.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.lengths = ExpectedLengths()
        self._fleet = fleet
        self._groups = Affinity()
        self._sessions = Affinity()
        self._prompts = PromptAffinity()
        self._hashes = TokenIndex(0)
        self._homes = Affinity(KEPT_HOMES, idle=None)
        self._turn = 0

    def place(self, terms: Terms) -> "RoutedRequest":
        """Return where a request runs."""
        return RoutedRequest(self, terms)

    def least_loaded(self, avoid: frozenset[str] = frozenset()) -> Member:
        """Return the replica on which the fewest tokens are expected; replicas with the same take turns.

        Raises:
            NoReplica
        """
        serving = [(number, m) for number, m in enumerate(self._fleet.members) if m.serves and m.name not in avoid]
        if not serving:
            raise no_replica(self._fleet)
        count = len(self._fleet.members)
        _, member = min(serving, key=lambda each: (each[1].load, each[1].in_flight, (each[0] - self._turn) % count))
        self._turn = (self._fleet.members.index(member) + 1) % count
        return member

    def by_hash(self, key: str, avoid: frozenset[str]) -> Member:
        """Return the replica that a key belongs to.

        Raises:
            NoReplica
        """
        serving = [member for member in self._fleet.serving if member.name not in avoid]
        if not serving:
            raise no_replica(self._fleet)
        return max(serving, key=lambda member: digest(f"{member.name} {key}".encode()))

    def choose(self, terms: Terms, prefixes: Hashes, avoid: frozenset[str]) -> Member:
        """Choose a replica, and remember it for requests that have to go there too.

        Raises:
            NoReplica
        """
        name = self._known(terms, prefixes)
        known = next((m for m in self._fleet.serving if m.name == name and m.name not in avoid), None)
        member = known or self.least_loaded(avoid)
        self._remember(terms, prefixes, member.name)
        return member

    def is_known(self, terms: Terms, prefixes: Hashes) -> bool:
        """Whether a request has to go to a certain replica."""
        return self._known(terms, prefixes) is not None

    def prefixes(self, terms: Terms) -> Hashes:
        """Return the hashes of all prefixes of a request's prompt."""
        return self._hashes.prefix_hashes(terms.units)

    def home(self, scope: str, prompt: Hashable) -> str | None:
        """Return the name of the replica that a prompt was on: it has its statistics.

        ``prompt``: the caller's key of it or, of a prompt of a batch without one, its identity.
        """
        return self._homes.find((scope, prompt))

    def remember_home(self, scope: str, prompt: Hashable, replica: str) -> None:
        self._homes.put((scope, prompt), replica)

    def _known(self, terms: Terms, prefixes: Hashes) -> str | None:
        """Return the name of the replica that a request has to go to, if there is one."""
        if terms.session is not None:
            opening = self._sessions.mark_of((terms.scope, terms.session))
            if opening not in (None, hash_of(prefixes)):
                return self._sessions.find((terms.scope, terms.session))
        if terms.may_join and terms.group is not None:
            return self._groups.find((terms.scope, terms.group))
        if terms.key is not None:
            return self.home(terms.scope, terms.key)
        if terms.may_join and (found := self._prompts.find_prompt(terms.scope, prefixes)) is not None:
            return found
        if terms.candidates > 1:
            return None
        return self._prompts.find_prefix(terms.scope, prefixes, 1 if terms.is_chat else MIN_PREFIX)

    def _remember(self, terms: Terms, prefixes: Hashes, replica: str) -> None:
        if terms.session is not None:
            session = (terms.scope, terms.session)
            opening = self._sessions.mark_of(session)
            self._sessions.put(session, replica, hash_of(prefixes) if opening is None else opening)
        if terms.may_join and terms.group is not None:
            self._groups.put((terms.scope, terms.group), replica)
        if terms.key is not None:
            self.remember_home(terms.scope, terms.key, replica)
        if terms.units:
            self._prompts.put_prompt(terms.scope, prefixes, replica)


class RoutedRequest:
    """One request, and where it runs."""

    def __init__(self, router: Router, terms: Terms) -> None:
        self._router = router
        self._terms = terms
        self._prefixes = router.prefixes(terms)
        self._prompt = (terms.scope, terms.key or hash_of(self._prefixes))

    @property
    def may_complete_a_group(self) -> bool:
        """Whether it is a single request, and others that it may form a group with have come before."""
        return self._terms.may_join and self._router.is_known(self._terms, self._prefixes)

    def choose(self, avoid: frozenset[str]) -> Member:
        return self._router.choose(self._terms, self._prefixes, avoid)

    @contextmanager
    def running_on(self, member: Member) -> Iterator[None]:
        with member.loaded(self._terms.candidates * self._router.lengths.of(self._prompt, self._terms.max_tokens)):
            yield

    def answered(self, status: int, body: bytes) -> None:
        tokens = generated_tokens(body) if status == HTTPStatus.OK else None
        if tokens is not None:
            self._router.lengths.learn(self._prompt, tokens / self._terms.candidates)


@dataclass(slots=True)
class KeyedRequest:
    """A request that every ingress sends to the same replica, while the same ones serve (rendezvous hashing)."""

    router: Router
    key: str

    def choose(self, avoid: frozenset[str]) -> Member:
        return self.router.by_hash(self.key, avoid)

    @contextmanager
    def running_on(self, member: Member) -> Iterator[None]:
        yield

    def answered(self, status: int, body: bytes) -> None:
        """Nothing is learned from it."""


@dataclass(slots=True)
class AnyReplica:
    """A request that any replica answers, and that generates nothing."""

    router: Router

    def choose(self, avoid: frozenset[str]) -> Member:
        return self.router.least_loaded(avoid)

    @contextmanager
    def running_on(self, member: Member) -> Iterator[None]:
        yield

    def answered(self, status: int, body: bytes) -> None:
        """Nothing is learned from it."""


def no_replica(fleet: Fleet) -> NoReplica:
    """Say why no replica can be chosen."""
    states = ", ".join(f"{m.name} is {m.state}" + (m.detail and f" ({m.detail})") for m in fleet.members)
    return NoReplica(f"no server can take the request: {states}; retry later", RETRY_SECONDS)
