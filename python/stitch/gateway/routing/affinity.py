"""Soft, bounded affinity: a key goes where its prefix cache is, unless that costs too much.

A binding is made by a good response only. A key without one starts at a place that every
gateway computes alike (rendezvous hashing), so that a group of requests sent at once shares
a replica. Constraints and load beat affinity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3

from stitch.env import Clock, Randomness
from stitch.gateway.config import GatewayConfig
from stitch.gateway.members import Seat

__all__ = ["Affinity"]


class Affinity:
    """The table of keys and the replicas that know them."""

    def __init__(self, *, config: GatewayConfig, clock: Clock, random: Randomness) -> None:
        self._config = config
        self._clock = clock
        self._random = random
        self._known: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def choose(self, key: str, seats: Sequence[Seat]) -> Seat:
        """The member for `key` among `seats`, which all could take the request; not empty."""
        roomy = [seat for seat in seats if seat.load < self._config.affinity_load_max]
        bound = self._replicas(key)
        for replica in bound:
            for seat in roomy:
                if seat.member.id == replica:
                    return seat
        if not roomy:
            return min(seats, key=lambda seat: (seat.in_flight, seat.load))
        if bound:
            # Random, not the idlest: many gateways must not all run to one new replica.
            return roomy[int(self._random.random() * len(roomy)) % len(roomy)]
        return max(roomy, key=lambda seat: _weight(key, seat.member.id))

    def bind(self, key: str, member_id: str) -> None:
        """A good response for `key` came from this member."""
        config = self._config
        replicas = [member_id, *(known for known in self._replicas(key) if known != member_id)]
        expiry = self._clock.monotonic() + config.affinity_ttl_s
        self._known[key] = (expiry, replicas[: config.affinity_replicas_max])
        self._known.move_to_end(key)
        while len(self._known) > config.affinity_keys_max:
            self._known.popitem(last=False)

    def forget(self, member_id: str) -> None:
        """The member left; its keys find another place, all others stay."""
        for key, (expiry, replicas) in list(self._known.items()):
            if member_id in replicas:
                rest = [known for known in replicas if known != member_id]
                if rest:
                    self._known[key] = (expiry, rest)
                else:
                    del self._known[key]

    def _replicas(self, key: str) -> list[str]:
        found = self._known.get(key)
        if found is None:
            return []
        expiry, replicas = found
        if self._clock.monotonic() >= expiry:
            del self._known[key]
            return []
        return replicas


def _weight(key: str, member_id: str) -> bytes:
    return blake3(f"{len(key)}:{key}{member_id}".encode()).digest(length=8)
