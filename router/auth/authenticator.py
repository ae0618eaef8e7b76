"""Authentication of a router's callers: by API keys, JSON web tokens, both, or not at all.

A caller shows one credential, as metadata `authorization: Bearer …` or `x-api-key: …`. The log says at level debug why
a credential is refused; the caller gets the same error in every case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from inflight.common.errors import Reason, RequestError
from inflight.router.auth.api_keys import ApiKey, find_key, parse_keys
from inflight.router.auth.caller import AnonymousAuthenticator, Authenticator, Caller, Metadata, remember_verified
from inflight.router.auth.jwt import TokenError, TokenRules, VerificationKey, parse_jwks, verify_token
from inflight.router.config.watched_file import FileWatcher
from inflight.router.settings import RouterSettings

log = logging.getLogger(__name__)

KeysFile = FileWatcher[tuple[ApiKey, ...]]
TokensFile = FileWatcher[dict[str, VerificationKey]]

# Health and reflection are open, and so are methods that reveal no more than health does.
CLOSED_SERVICES = ("/inflight.v1.InferenceService/", "/inference.GRPCInferenceService/")
OPEN_METHODS = frozenset(
    {"/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"},
)

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
BEARER = "bearer"


class CredentialAuthenticator:
    """Identifies callers by their credentials."""

    def __init__(
        self,
        keys: Callable[[], tuple[ApiKey, ...]] | None,
        tokens: Callable[[], Mapping[str, VerificationKey]] | None,
        rules: TokenRules,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._rules = rules
        self._now_s = now_s

    def identify(self, metadata: Metadata) -> Caller:
        credential = _credential(metadata)
        if self._tokens is not None and (self._keys is None or credential.count(".") == 2):
            return self._bearer(credential, self._tokens())
        assert self._keys is not None
        key = find_key(self._keys(), credential)
        if key is None or not key.opens(self._now_s()):
            raise _refused("the key is not known" if key is None else f"key {key.key_id!r} has expired or is disabled")
        return key.caller

    def _bearer(self, token: str, keys: Mapping[str, VerificationKey]) -> Caller:
        try:
            return verify_token(token, keys, self._rules)
        except TokenError as error:
            raise _refused(f"the token: {error}") from None


class Authentication:
    """A router's authenticator, and the files that it reads."""

    def __init__(self, settings: RouterSettings, served: Callable[[], Collection[str]] | None = None) -> None:
        """Reads the files. `served` are the names of models that clients may ask for. Raises `SettingError`."""
        keys, tokens = settings.api_keys_file, settings.jwt_jwks_file

        def parse(source: str) -> tuple[ApiKey, ...]:
            parsed = parse_keys(source)
            if served is not None:
                _warn_of_unserved_models(parsed, served())
            return parsed

        self._keys = KeysFile(keys, "api_keys_file", "API keys file", parse) if keys else None
        self._tokens = TokensFile(tokens, "jwt_jwks_file", "JWKS file", parse_jwks) if tokens else None
        self.authenticator = self._authenticator(
            TokenRules(settings.jwt_issuer, settings.jwt_audience, settings.jwt_tenant_claim)
        )

    def _authenticator(self, rules: TokenRules) -> Authenticator:
        keys, tokens = self._keys, self._tokens
        if keys is None and tokens is None:
            return AnonymousAuthenticator()
        return CredentialAuthenticator(
            None if keys is None else lambda: keys.content, None if tokens is None else lambda: tokens.content, rules
        )

    def check_call(self, method: str, metadata: Metadata) -> None:
        """Verifies the caller of a method before the request is received. Raises `RequestError` UNAUTHENTICATED."""
        if method.startswith(CLOSED_SERVICES) and method not in OPEN_METHODS:
            remember_verified(self.authenticator.identify(metadata))

    async def follow(self) -> None:
        """Reads the files again when they change, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for file in (self._keys, self._tokens):
                if file is not None:
                    tasks.create_task(file.follow())


def _warn_of_unserved_models(keys: Sequence[ApiKey], served: Collection[str]) -> None:
    """Warns of keys that name no served model. Such a key sees no model, and its user is told nothing more."""
    for key in keys:
        for name in sorted((key.caller.models or frozenset()) - frozenset(served)):
            log.warning(
                "API key %r names the model %r, which is not served here; served: %s",
                key.key_id,
                name,
                ", ".join(sorted(served)),
            )


def _credential(metadata: Metadata) -> str:
    """Returns the one credential that the caller shows."""
    shown = [(key, value) for key, value in metadata if key in (AUTHORIZATION, API_KEY)]
    if len(shown) != 1:
        raise _refused("no credential" if not shown else "several credentials")
    ((key, value),) = shown
    if key == API_KEY:
        return str(value)
    scheme, _, credential = str(value).partition(" ")
    if scheme.lower() != BEARER:
        raise _refused("the authorization is not a Bearer credential")
    return credential.strip()


def _refused(why: str) -> RequestError:
    log.debug("a caller is not let in: %s", why)
    return RequestError(
        Reason.UNAUTHENTICATED, "a valid credential is needed: metadata 'authorization: Bearer …' or 'x-api-key: …'"
    )
