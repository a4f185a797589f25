"""The wiring: engines, arbiter, listeners and pages made from a configuration, started and stopped in order."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from twisted.application.service import Service
from twisted.internet import ssl
from twisted.internet.defer import Deferred, DeferredList, inlineCallbacks, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.web.client import BrowserLikePolicyForHTTPS

from turnstile import __version__, activation, exitcode
from turnstile import log as tlog
from turnstile.absent import NOWHERE, AbsentPolicy
from turnstile.activation import Inherited, Listener
from turnstile.arbiter import Arbiter
from turnstile.broker import BrokerStatus, make_route
from turnstile.card import Card
from turnstile.child.listeners import listeners_on
from turnstile.commands import ShellCommands
from turnstile.config import SETTINGS, Config, ConfigError, Upstream, split_endpoint
from turnstile.engines.base import Engine
from turnstile.engines.client import JsonClient, make_client
from turnstile.engines.comfy_events import make_connect_events
from turnstile.engines.comfy_free import Memory
from turnstile.engines.comfyui import ComfyEngine
from turnstile.engines.llamacpp import LlamaEngine
from turnstile.engines.ollama import OllamaEngine
from turnstile.engines.sdserver import SdEngine
from turnstile.gates import (
    ComfyPolicy,
    EnginePolicy,
    LlamaPolicy,
    NestedHint,
    NestedOllamaPolicy,
    OllamaPolicy,
    SdPolicy,
    SdResource,
)
from turnstile.metrics import Metrics
from turnstile.narrator import Narrator
from turnstile.peers import Peers
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.sockets import SocketLoop, socket_loop
from turnstile.proxy.upstream import UpstreamPool
from turnstile.proxy.vigil import Vigil
from turnstile.sdlaunch import Spawns, make_launch
from turnstile.status import StateResource, make_status_tree
from turnstile.vram.choice import make_vram
from turnstile.vram.reading import Reading
from turnstile.warm import Warmer

_log = tlog.Logger()

#: Connections that may wait in the kernel to be accepted.
BACKLOG = 1024
#: Seconds at the stop for requests that are on their way in and wait for nobody, and how often they are looked at.
SETTLE_TIME = 1.0
SETTLE_INTERVAL = 0.01
#: The settings of each listener, by its name: where it listens, and what has to be set for it to have an engine.
LISTENERS = {
    "ollama": ("LISTEN_OLLAMA", "OLLAMA_URL"),
    "ollama-nested": ("LISTEN_OLLAMA_NESTED", "LISTEN_OLLAMA_NESTED"),
    "comfyui": ("LISTEN_COMFY", "COMFY_URL"),
    "llamacpp": ("LISTEN_LLAMA", "LLAMA_URL"),
    "sd": ("LISTEN_SD", "SD_ARGS"),
    "broker": ("LISTEN_BROKER", "LISTEN_BROKER"),
}
#: Their names in log and state page, by the setting.
SITES = {setting: name for name, (setting, _) in LISTENERS.items()}
_FIELDS = {setting.env: setting.field for setting in SETTINGS}

_OUR_PATHS = b"/turnstile/"


class TurnstileService(Service):
    """Everything that one turnstile process runs.

    :param config: the settings.
    :param reactor: makes connections and tells the time.
    :param spawner: starts sd-server instead of the real one.
    :param sockets: listening sockets that systemd opened.
    """

    def __init__(
        self,
        config: Config,
        *,
        reactor: Any,
        spawner: Spawns | None = None,
        sockets: tuple[Inherited, ...] = (),
    ) -> None:
        self.config = config
        self._reactor = reactor
        self.arbiter = Arbiter(
            reactor, image_burst=config.image_burst, max_inflight=config.llm_max_inflight
        )
        self.card = Card(reactor)
        self.metrics = Metrics()
        self.metrics.connect(self.arbiter, self.card)
        self.peers = Peers(config.gpu_key)
        self.metrics.registry.register(self.peers)
        self.narrator = Narrator(self.arbiter, self.card)
        self.vigil = Vigil(reactor)
        self._sockets = socket_loop(reactor)
        self.ollama: OllamaEngine | None = None
        self.comfy: ComfyEngine | None = None
        self.llama: LlamaEngine | None = None
        self.sd: SdEngine | None = None
        self.sites: dict[str, ProxySite] = {}
        self.ports: dict[str, Any] = {}
        self._clients: list[JsonClient] = []
        self._pools: list[UpstreamPool] = []
        self._warmer: Warmer | None = None
        self._undo_sighup: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._announced = False
        self._is_cut = False
        #: What our own calls to engines carry, by which they are known should they come back to us.
        self._marks: dict[bytes, str] = {}
        #: Fires once all listeners are open.
        self.bound: Deferred[None] = Deferred()
        #: Fires once the engines were looked at, from when on requests are granted the card.
        self.ready: Deferred[None] = Deferred()
        #: What SIGHUP does.
        self.on_hangup: Callable[[], None] = tlog.reopen
        self._retry = RetryPolicy(
            config.backoff_initial, config.backoff_max, config.retry_status_limit
        )
        #: For engines whose 503 has a meaning of its own.
        self._retry_connecting = RetryPolicy(config.backoff_initial, config.backoff_max, 0)
        self._trust_root = _trust_root(config)
        self._listens = {SITES[name]: text for name, text in config.listeners()}
        self._build(spawner)
        self._inherited = self._assign(sockets)

    # -- building ---------------------------------------------------------------------------------------------

    def _build(self, spawner: Spawns | None) -> None:
        config = self.config
        self._build_chat_engines()
        comfy_client: JsonClient | None = None
        if config.comfy_url is not None:
            comfy_client = self._client("COMFY_URL", config.comfy_url)
            self.comfy = ComfyEngine(
                comfy_client,
                self._reactor,
                self.arbiter,
                self.card,
                make_connect_events(
                    self._reactor,
                    config.comfy_url,
                    connect_timeout=lambda: self.config.connect_timeout,
                    context_factory=self._context_factory(),
                ),
                job_timeout=config.job_timeout,
                job_timeout_action=config.job_timeout_action,
                history_poll_interval=config.history_poll_interval,
                free_timeout=config.free_timeout,
                probe_timeout=config.probe_timeout,
                prompt_capture_limit=config.prompt_capture_limit,
                free_between_jobs=config.free_between_jobs,
                evict_nested=(lambda: self.card.evict("ollama"))
                if self.ollama is not None
                else None,
            )
            self.card.register(self.comfy)
            self.comfy.add_job_listener(self.metrics.job_done)
            self.comfy.add_memory_listener(self._memory_seen)
        if config.sd_args is not None:
            self._build_sd(spawner)
        if self.ollama is not None and self.comfy is not None:
            self._warmer = Warmer(
                self.arbiter,
                self.card,
                self.ollama,
                config.warm_model or "",
                config.warm_timeout,
                self._reactor,
            )
        self.vram = make_vram(self._reactor, config, comfy_client)
        self.vram.add_reading_listener(self._reading_seen)
        self.vram.add_wait_listener(self.metrics.memory_waited)
        self.card.memory = self.vram
        self.metrics.watch(self.engines)
        self._build_sites()

    def _build_chat_engines(self) -> None:
        config = self.config
        if config.ollama_url is not None:
            self.ollama = OllamaEngine(
                self._client("OLLAMA_URL", config.ollama_url),
                self._reactor,
                self.card,
                unload_timeout=config.unload_timeout,
                unload_poll_interval=config.unload_poll_interval,
                probe_timeout=config.probe_timeout,
            )
            self.card.register(self.ollama)
        if config.llama_url is not None:
            key = config.llama_api_key
            self.llama = LlamaEngine(
                self._client(
                    "LLAMA_URL",
                    config.llama_url,
                    {} if key is None else {"Authorization": f"Bearer {key}"},
                ),
                self._reactor,
                self.card,
                unload_timeout=config.unload_timeout,
                unload_poll_interval=config.unload_poll_interval,
                probe_timeout=config.probe_timeout,
                load_timeout=config.load_wait,
                commands=ShellCommands(self._reactor),
                stop_command=config.llama_stop_command,
                start_command=config.llama_start_command,
            )
            self.card.register(self.llama)

    def _build_sd(self, spawner: Spawns | None) -> None:
        config = self.config
        launch = make_launch(config, self._reactor, os.environ, spawner)
        self.sd = SdEngine(
            self._client("SD_URL", config.sd_url),
            self._reactor,
            self.arbiter,
            self.card,
            launch,
            idle=config.sd_idle,
            load_wait=config.load_wait,
            stop_grace=config.sd_stop_grace,
            job_timeout=config.job_timeout,
            probe_timeout=config.probe_timeout,
            backoff_initial=config.backoff_initial,
            backoff_max=config.backoff_max,
            capture_limit=config.prompt_capture_limit,
            log_path=launch.log_path,
            listeners=listeners_on if spawner is None else _nobody,
        )
        self.card.register(self.sd)
        self.sd.add_job_listener(self.metrics.job_done)

    def _build_sites(self) -> None:
        config = self.config
        pages = self._pages = make_status_tree(
            self.arbiter,
            self.card,
            self.engines,
            self._reactor,
            __version__,
            self.metrics,
            short_forms=True,
            vram=self.vram.snapshot,
            gpu_share=self.peers.to_dict,
        )
        # Where the engine has pages of such names itself, ours have their long names only.
        long_forms = {path: page for path, page in pages.items() if path.startswith(_OUR_PATHS)}
        if self.ollama is not None and config.ollama_url is not None:
            self._build_ollama_sites(self.ollama, self._pool(config.ollama_url), pages)
        if self.comfy is not None and config.comfy_url is not None:
            comfy_policy = ComfyPolicy(
                config, self.arbiter, self.card, self.comfy, self._reactor, self._guard
            )
            self._site("comfyui", self._pool(config.comfy_url), comfy_policy, pages)
        if self.llama is not None and config.llama_url is not None:
            llama_pool = self._pool(config.llama_url)
            llama_policy = LlamaPolicy(config, self.arbiter, self.card, self.llama, self._reactor)
            self._site("llamacpp", llama_pool, llama_policy, long_forms)
        if self.sd is not None:
            sd_pool = self._pool(config.sd_url)
            sd_policy = SdPolicy(
                config,
                self.arbiter,
                self.card,
                self.sd,
                self._reactor,
                self._guard,
                self.metrics.job_done,
            )
            self._site("sd", sd_pool, sd_policy, long_forms)
            if "broker" in self._listens:
                assert self.llama is not None
                llama = self._resource("broker", llama_pool, llama_policy)
                sd = self._resource("broker", sd_pool, sd_policy)
                state = pages[b"/turnstile/state"]
                assert isinstance(state, StateResource)
                status = BrokerStatus(state.state)
                self._add_site(
                    "broker",
                    llama,
                    {**pages, b"/status": status},
                    route=make_route(llama, sd),
                    others=[sd],
                )

    def _build_ollama_sites(
        self, engine: OllamaEngine, pool: UpstreamPool, pages: dict[bytes, Any]
    ) -> None:
        config = self.config
        hint = None
        if config.comfy_url is not None:
            hint = NestedHint(self.arbiter, config.comfy_url.host, config.listen_ollama_nested)
        policy = OllamaPolicy(config, self.arbiter, self.card, engine, self._reactor, on_wait=hint)
        self._site("ollama", pool, policy, pages)
        nested = NestedOllamaPolicy(
            config,
            self.arbiter,
            self.card,
            engine,
            self._reactor,
            self.comfy,
            self.metrics.nested_call,
        )
        self._site("ollama-nested", pool, nested, pages)

    def _guard(self) -> None:
        """An image job begins: chat engines are looked at whose requests were aborted lately."""
        if self.ollama is not None:
            self.ollama.guard()
        if self.llama is not None:
            self.llama.guard()

    def _site(
        self, name: str, pool: UpstreamPool, policy: EnginePolicy, pages: dict[bytes, Any]
    ) -> None:
        """Make what serves one engine's clients, if there is to be a listener of that name."""
        if name not in self._listens:
            return
        comfy = self.comfy if name == "comfyui" else None
        resource = self._resource(name, pool, policy, relays_websockets=comfy is not None)
        self._add_site(
            name,
            resource,
            pages,
            on_text=comfy.tap if comfy is not None else None,
            on_relays=self.metrics.relays_changed,
        )

    def _resource(
        self,
        name: str,
        pool: UpstreamPool,
        policy: EnginePolicy,
        *,
        relays_websockets: bool = False,
    ) -> EngineResource:
        kind = SdResource if isinstance(policy, SdPolicy) else EngineResource
        return kind(
            pool,
            policy,
            reactor=self._reactor,
            retry=self._retry if policy.repeats_status else self._retry_connecting,
            observer=self.metrics,
            relays_websockets=relays_websockets,
            tls=self._listens.get(name, "").startswith("ssl:"),
        )

    def _add_site(
        self, name: str, resource: EngineResource, pages: dict[bytes, Any], **options: Any
    ) -> None:
        self.sites[name] = ProxySite(
            resource,
            pages,
            clock=self._reactor,
            vigil=self.vigil,
            marks=tuple(self._marks),
            on_loop=self._leads_back,
            **options,
        )

    def _assign(self, sockets: tuple[Inherited, ...]) -> dict[str, tuple[Inherited, ...]]:
        """Give each listener the sockets that are its own, and those without an engine a site that says so."""
        config = self.config
        listeners = {}
        for name in self.sites:
            setting = LISTENERS[name][0]
            source = config.sources.get(_FIELDS[setting], "")
            listeners[name] = Listener(self._listens[name], setting, source)
        assignment = activation.assign(sockets, listeners)
        inherited = dict(assignment.taken)
        for sock in assignment.spare:
            known = LISTENERS.get(sock.name)
            name = sock.name or f"descriptor {sock.fd}"
            if known is not None:
                reason = f"this port has no engine: turnstile's {known[1]} is not set"
            else:
                reason = f"this port has no engine: turnstile knows no listener named {name}"
            if name not in self.sites:
                _log.warn(
                    "systemd passes a socket ({name} at {address}) that is answered 503: {reason}",
                    name=name,
                    address=str(sock),
                    reason=reason,
                )
                policy = AbsentPolicy(name, reason, config.busy_retry_after)
                resource = self._resource(name, self._pool(NOWHERE), policy)
                self._add_site(name, resource, self._pages)
            inherited[name] = (*inherited.get(name, ()), sock)
        return inherited

    @property
    def engines(self) -> list[Engine]:
        """The engines that are configured."""
        engines = (self.ollama, self.llama, self.comfy, self.sd)
        return [engine for engine in engines if engine is not None]

    def _reading_seen(self, reading: Reading | None) -> None:
        self.metrics.set_vram(
            used=None if reading is None else reading.used,
            total=None if reading is None else reading.total,
        )

    def _memory_seen(self, memory: Memory | None) -> None:
        """What ComfyUI tells of its card, where nobody tells better."""
        if self.vram.works:
            return
        self.metrics.set_vram(
            used=None if memory is None else memory.used,
            total=None if memory is None else memory.total,
        )

    def _client(
        self, setting: str, upstream: Upstream, headers: dict[str, str] | None = None
    ) -> JsonClient:
        mark = secrets.token_hex(16)
        self._marks[mark.encode()] = f"{setting} ({upstream.url})"
        client = make_client(
            self._reactor,
            upstream,
            connect_timeout=self.config.connect_timeout,
            context_factory=self._context_factory(),
            mark=mark,
            headers=headers,
        )
        self._clients.append(client)
        return client

    def _leads_back(self, mark: bytes) -> None:
        """A call of our own to an engine came in at one of our listeners."""
        message = f"{self._marks[mark]} leads back to turnstile itself: move the engine to another port, or turnstile"
        if self.ready.called:
            _log.error("{problem}", problem=message)
        else:
            exitcode.fail_startup(self._reactor, message, exitcode.EXIT_CONFIG)

    def _context_factory(self) -> Any:
        return BrowserLikePolicyForHTTPS(self._trust_root) if self._trust_root is not None else None

    def _pool(self, upstream: Upstream) -> UpstreamPool:
        pool = UpstreamPool(
            self._sockets,
            upstream,
            timeout=self.config.connect_timeout,
            trust_root=self._trust_root,
        )
        self._pools.append(pool)
        return pool

    # -- starting ---------------------------------------------------------------------------------------------

    def privilegedStartService(self) -> None:
        """Bind the listeners, while low ports may still be bound."""
        super().privilegedStartService()  # type: ignore[no-untyped-call]
        self._announce()
        self._listen()

    def startService(self) -> None:
        """Look at the engines; nothing is granted until each was looked at once."""
        super().startService()  # type: ignore[no-untyped-call]
        self._announce()
        self._listen()
        self._undo_sighup = tlog.install_sighup(self._reactor, self.reload)
        self._resume = self.arbiter.hold()
        if self._warmer is not None:
            self._warmer.start()
        # Not waited for: a driver in trouble is no reason to serve nobody.
        self.vram.start()
        looks = DeferredList([engine.start() for engine in self.engines], consumeErrors=True)
        looks.addCallback(self._looked)

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            tlog.log_startup(_log, self.config, __version__)
            for line in self.peers.describe_now():
                _log.info("{line}", line=line)

    def _looked(self, results: list[Any]) -> None:
        for success, result in results:
            if not success:
                _log.failure("the first look at an engine failed", failure=result)
        if self._resume is not None:
            self._resume()
        self.ready.callback(None)

    def _listen(self) -> None:
        if self.ports:
            return
        ways = [(*way, name) for name in self.sites for way in self._ways_in(name)]
        self.ports = dict.fromkeys(key for key, _, _, _ in ways)
        for key, text, way, name in ways:
            d = maybeDeferred(way, self.sites[name])
            d.addCallback(self._bound, key)
            d.addErrback(self._not_bound, name, text)

    def _ways_in(self, name: str) -> Iterator[tuple[str, str, Callable[[ProxySite], Any]]]:
        """For each port of one listener its key in :attr:`ports`, its address, and what opens it."""
        inherited = self._inherited.get(name, ())
        for number, sock in enumerate(inherited, 1):
            key = name if number == 1 else f"{name} {number}"
            yield key, f"{sock} (systemd's)", partial(activation.listen, self._reactor, sock)
        if not inherited:
            text = self._listens[name]
            yield name, text, partial(self._open, text)

    def _open(self, text: str, site: ProxySite) -> Any:
        _remove_stale_socket(text)
        return serverFromString(self._reactor, _with_backlog(text)).listen(site)

    def _bound(self, port: Any, name: str) -> None:
        self.ports[name] = port
        if isinstance(self._sockets, SocketLoop):
            self._sockets.adopt(port)
        _log.info("{listener} listens on {address}", listener=name, address=str(port.getHost()))
        if all(self.ports.values()):
            self.bound.callback(None)

    @property
    def _policies(self) -> list[EnginePolicy]:
        resources = [r for site in self.sites.values() for r in site.resources]
        return [r.policy for r in resources if isinstance(r.policy, EnginePolicy)]

    def ailment(self) -> str:
        """What is wrong with a service that should run; empty: nothing."""
        for name, port in self.ports.items():
            if self.running and port is not None and not getattr(port, "connected", True):
                return f"{name} does not listen any more"
        return ""

    def _not_bound(self, failure: Failure, name: str, text: str) -> None:
        error = failure.value
        cause = error.socketError if isinstance(error, CannotListenError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        if getattr(cause, "errno", None) == errno.EADDRINUSE and not text.startswith("unix:"):
            reason += _who_may_hold(name)
        exitcode.fail_startup(self._reactor, f"cannot listen for {name} on {text}: {reason}")

    # -- running ----------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """SIGHUP: open the log file anew, and whatever else :attr:`on_hangup` does."""
        self.on_hangup()

    def apply(self, config: Config) -> None:
        """Put the settings of :data:`turnstile.reload.LIVE` into effect; the others are as they were."""
        self.config = config
        self.arbiter.change_limits(
            image_burst=config.image_burst, max_inflight=config.llm_max_inflight
        )
        for client in self._clients:
            client.set_connect_timeout(config.connect_timeout)
        for pool in self._pools:
            pool.set_timeout(config.connect_timeout)
        for retry in (self._retry, self._retry_connecting):
            retry.initial = config.backoff_initial
            retry.maximum = config.backoff_max
        self._retry.status_limit = config.retry_status_limit
        self.vram.wait = config.vram_wait
        for policy in self._policies:
            policy.configure(config)
        if self.ollama is not None:
            self.ollama.unload_timeout = config.unload_timeout
            self.ollama.unload_poll_interval = config.unload_poll_interval
            self.ollama.probe_timeout = config.probe_timeout
        if self.llama is not None:
            self.llama.change_limits(
                unload_timeout=config.unload_timeout,
                unload_poll_interval=config.unload_poll_interval,
                probe_timeout=config.probe_timeout,
                load_timeout=config.load_wait,
            )
        if self.sd is not None:
            self.sd.change_limits(
                idle=config.sd_idle,
                load_wait=config.load_wait,
                stop_grace=config.sd_stop_grace,
                job_timeout=config.job_timeout,
                probe_timeout=config.probe_timeout,
                backoff_initial=config.backoff_initial,
                backoff_max=config.backoff_max,
                capture_limit=config.prompt_capture_limit,
            )
        if self.comfy is not None:
            self.comfy.change_limits(
                job_timeout=config.job_timeout,
                job_timeout_action=config.job_timeout_action,
                history_poll_interval=config.history_poll_interval,
                free_timeout=config.free_timeout,
                probe_timeout=config.probe_timeout,
                prompt_capture_limit=config.prompt_capture_limit,
                free_between_jobs=config.free_between_jobs,
            )
        if self._warmer is not None:
            self._warmer.model = config.warm_model or ""
            self._warmer.timeout = config.warm_timeout

    # -- stopping ---------------------------------------------------------------------------------------------

    @inlineCallbacks
    def stopService(self) -> Any:
        """Stop accepting, answer what waits with 503, let streams finish for SHUTDOWN_TIMEOUT, cut the rest."""
        super().stopService()  # type: ignore[no-untyped-call]
        for port in self.ports.values():
            if port is not None:
                yield port.stopListening()
        if self._warmer is not None:
            self._warmer.stop()
        timer = self._reactor.callLater(self.config.shutdown_timeout, self._cut)
        yield self._settle()
        self.arbiter.close()
        drains: Deferred[Any] = DeferredList([site.drain() for site in self.sites.values()])
        if self._is_cut:
            self._abort()
        yield drains
        if timer.active():
            timer.cancel()
        self.card.stop()
        self.vram.stop()
        # Children are gone when this is over: whoever waits for our end may start the next turnstile.
        yield DeferredList([maybeDeferred(engine.stop) for engine in self.engines])
        for pool in self._pools:
            pool.abort()
        for client in self._clients:
            yield client.close()
        self.vigil.stop()
        # Not before: without its handler the signal would end the process in the middle of all this.
        if self._undo_sighup is not None:
            self._undo_sighup()

    @inlineCallbacks
    def _settle(self) -> Any:
        """Let in what was accepted already and waits for nobody, so that a restart loses none of it."""
        for site in self.sites.values():
            site.last_call()
        end = self._reactor.seconds() + min(SETTLE_TIME, self.config.shutdown_timeout)
        while self._reactor.seconds() < end and not self._is_cut:
            if not any(site.unsettled for site in self.sites.values()):
                break
            yield deferLater(self._reactor, SETTLE_INTERVAL, _nothing)

    def hasten(self) -> None:
        """Cut what a stop under way still waits for."""
        if self.sd is not None:
            self.sd.hasten()
        self._cut("interrupted once more")

    def _cut(self, why: str = "SHUTDOWN_TIMEOUT is over") -> None:
        if self._is_cut:
            return
        self._is_cut = True
        _log.warn("answers in progress are cut: {why}", why=why)
        self._abort()

    def _abort(self) -> None:
        for site in self.sites.values():
            site.abort()


def _nobody(port: int, leader: int | None) -> tuple[()]:
    return ()


def _nothing() -> None:
    """There is nothing to do."""


def _trust_root(config: Config) -> Any:
    if config.upstream_ca is None:
        return None
    certificates: list[Any] = []
    try:
        with open(config.upstream_ca, "rb") as file:
            pem = file.read(_LARGEST_CA_FILE)
        for block in _CERTIFICATE.findall(pem):
            certificates.append(ssl.Certificate.loadPEM(block))
        if not certificates:
            raise ValueError("no certificate in it")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"UPSTREAM_CA {config.upstream_ca}: {reason}") from None
    except Exception:  # OpenSSL's own, a list of tuples
        raise ConfigError(
            f"UPSTREAM_CA {config.upstream_ca}: certificate {len(certificates) + 1} can't be read"
        ) from None
    return ssl.trustRootFromCertificates(certificates)


_LARGEST_CA_FILE = 16 << 20
_CERTIFICATE = re.compile(
    rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----.+?-----END (?:TRUSTED |X509 )?CERTIFICATE-----",
    re.DOTALL,
)


def _remove_stale_socket(text: str) -> None:
    """Take a socket file away that nobody listens on: its process was killed, and binding would fail."""
    kind, positional, named = split_endpoint(text)
    path = positional[0] if positional else named.get("address", "")
    try:
        if kind != "unix" or not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                # Twisted's lock names a process; another one may have its number by now.
                os.unlink(f"{path}.lock")
    except OSError:
        # Binding it tells the reason better.
        return


def _with_backlog(text: str) -> str:
    """A TCP endpoint with a backlog for bursts; twisted's default of 50 refuses some of them."""
    if text.startswith(("tcp:", "tcp6:", "ssl:")) and ":backlog=" not in text:
        return f"{text}:backlog={BACKLOG}"
    return text


def _who_may_hold(name: str) -> str:
    if name == "ollama":
        return " (Ollama itself may still be on it: move it, e.g. OLLAMA_HOST=127.0.0.1:11435)"
    if name == "comfyui":
        return " (ComfyUI itself may still be on it: move it, e.g. --port 8189)"
    if name == "llamacpp":
        return " (llama-server itself may still be on it: move it, e.g. --port 8081)"
    return ""
