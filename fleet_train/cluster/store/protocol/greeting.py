"""The handshake of a connection: member and job, and the proof on both sides that the secret is known."""

from __future__ import annotations

from fleet_train.cluster import secret as secrets
from fleet_train.cluster.store.protocol.access import Access
from fleet_train.cluster.store.protocol.wire import Header, ProtocolError

_SIGNED = ("job", "nonce", "round", "group", "member", "role")


class Refused(Exception):
    """The server does not accept this connection. ``is_temporary``: it may accept it later."""

    def __init__(self, message: str, *, kind: str = "", is_temporary: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_temporary = is_temporary


class Caller:
    """The connecting side: ``hello`` is sent first; every answer goes to ``heard`` until it returns None."""

    def __init__(self, access: Access, identity: Header) -> None:
        self._access = access
        self._nonce = secrets.new_nonce()
        self._identity = identity
        self._is_proved = False
        has_secret = access.secret is not None
        self.hello: Header = {"do": "hello", "job": access.job, "nonce": self._nonce, "secret": has_secret, **identity}

    def heard(self, answer: Header) -> Header | None:
        """The next message; None once the connection is accepted. Raises Refused, with a message for the user."""
        if "error" in answer:
            raise self._refusal(answer)
        secret = self._access.secret
        if "challenge" not in answer:
            if secret is not None and not self._is_proved:
                raise Refused("it does not know this job's secret; give every node the same --job_secret_file")
            return None
        nonce = str(answer["challenge"])[:200]
        if secret is None:
            raise Refused("it requires this job's secret; give every node the same --job_secret_file")
        if not secrets.is_proof(answer.get("proof"), secret, *signed("server", self.hello, nonce)):
            raise Refused("it has another secret than this node; give every node the same --job_secret_file")
        self._is_proved = True
        return {"do": "prove", "proof": secrets.proof(secret, *signed("caller", self.hello, nonce))}

    def _refusal(self, answer: Header) -> Refused:
        kind = str(answer["error"])[:40]
        match kind:
            case "address":
                why = (
                    f"it accepts the addresses of the node list only, and this connection comes from "
                    f"{str(answer.get('address'))[:60]}; name this machine in the node list by that address, or give "
                    "every node the same --job_secret_file"
                )
            case "job":
                why = (
                    f"it belongs to another job, {str(answer.get('job'))[:200]!r}, and this is "
                    f"{self._access.job!r}; end that job, or choose another --started_port"
                )
            case "secret":
                why = "it has another secret than this node; give every node the same --job_secret_file"
            case "no secret":
                why = "it has no job secret and this node has one; give every node the same --job_secret_file"
            case "closed":
                why = "it has not opened this round yet"
            case "store":
                why = f"it relays to a server that is lost: {str(answer.get('why'))[:500]}"
            case "full":
                why = "it has reached its limit of connections"
            case other:
                why = f"it answered {other!r}"
        is_temporary = kind in ("closed", "full") or (kind == "address" and answer.get("later") is True)
        return Refused(why, kind=kind, is_temporary=is_temporary)


def signed(side: str, hello: Header, nonce: str) -> tuple[str, ...]:
    """The data that a proof of ``side`` covers: both nonces, and everything that decides what the connection may do."""
    return (side, nonce, *(str(hello.get(name)) for name in _SIGNED))


class Callee:
    """The server's side of the handshake, with this access."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._hello: Header = {}
        self._nonce = ""

    def heard(self, word: Header) -> tuple[Header | None, Header | None]:
        """(answer, the caller's hello once it is accepted). Raises Refused with the answer as its kind."""
        if not self._hello:
            return self._greet(word)
        secret = self._access.secret
        assert secret is not None
        if word.get("do") != "prove":
            raise ProtocolError("a proof was expected")
        if not secrets.is_proof(word.get("proof"), secret, *signed("caller", self._hello, self._nonce)):
            raise Refused("another secret", kind="secret")
        return None, self._hello

    def _greet(self, word: Header) -> tuple[Header | None, Header | None]:
        if word.get("do") != "hello" or not isinstance(word.get("nonce"), str):
            raise ProtocolError("a hello was expected")
        if any(isinstance(word.get(name), (list, dict)) for name in _SIGNED):
            raise ProtocolError("a hello has texts and numbers only")
        if word.get("job") != self._access.job:
            raise Refused("another job", kind="job")
        if self._access.secret is None:
            if word.get("secret") is True:
                raise Refused("no secret here", kind="no secret")
            return None, word
        self._hello, self._nonce = word, secrets.new_nonce()
        answer = secrets.proof(self._access.secret, *signed("server", word, self._nonce))
        return {"challenge": self._nonce, "proof": answer}, None
