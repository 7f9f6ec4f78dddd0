"""The page and its events over HTTP. Everything served is in memory; no path of a request is
ever a path of a file. The only module that uses starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from evenly.errors import SettingError
from evenly.report import bundle
from evenly.watch.hub import Hub

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

PORT = 8765
"""Where a page is looked for first."""
_NEEDED = ("starlette", "uvicorn", "vl_convert")

# Vega makes functions of its expressions.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def check_installed() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SettingError(
            f"the live page needs packages that are not installed ({', '.join(missing)}): "
            "pip install starlette uvicorn vl-convert-python"
        )


def check_folder(folder: Path) -> None:
    """It need not be there yet."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file. Name the run's folder, which holds its record.")


def listen(host: str, port: int | None) -> socket.socket:
    """A socket for the page: at ``port``, or else at the usual one or any that is free."""
    wanted = [PORT, 0] if port is None else [port]
    problem: OSError | None = None
    for one in wanted:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, one), family=family)
        except OSError as error:
            problem = error
    raise SettingError(
        f"the page cannot be served at {host}, port {wanted[0]}: {problem}. Give another --host "
        "or --port; without --port any free one is taken."
    )


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.rstrip(".").lower() == "localhost"


def application(hub: Hub, host: str = "127.0.0.1") -> Starlette:
    """Four things to read, and nothing to write."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    def fixed(text: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(text, media_type=kind)

    async def events(request: Request) -> Response:
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(hub.events(), media_type="text/event-stream", headers=headers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.run())
        try:
            yield
        finally:
            hub.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    name = escape(hub.follower.folder.resolve().name)
    style = _file("evenly.report", "page.css") + _file("evenly.watch", "page.css")
    page = _file("evenly.watch", "page.html").replace("{name}", name)
    return Starlette(
        routes=[
            Route("/", fixed(page, "text/html"), methods=["GET"]),
            Route("/page.css", fixed(style, "text/css"), methods=["GET"]),
            Route("/page.js", fixed(_file("evenly.watch", "page.js"), "text/javascript")),
            Route("/charts.js", fixed(bundle.javascript(), "text/javascript")),
            Route("/events", events, methods=["GET"]),
        ],
        middleware=[Middleware(_Guard, host=host)],
        lifespan=lifespan,
    )


class _Guard:
    """Refuses requests that were meant for another name, and adds the headers of all answers.

    A page elsewhere can let its own name lead to this machine; browsers then send that name.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host
        self._names = {"localhost", host.lower()}
        if not is_loopback(host):
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", []))  # type: ignore[call-overload]
                extra = [(n.lower().encode(), v.encode()) for n, v in _HEADERS.items()]
                message = {**message, "headers": [*given, *extra]}
            await send(message)

        from starlette.responses import PlainTextResponse

        app: ASGIApp = self._app
        if not self._meant(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            app = PlainTextResponse("This page is not for that name.\n", status_code=421)
        await app(scope, receive, guarded)  # type: ignore[arg-type]

    def _meant(self, header: str) -> bool:
        name = header.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._host)


def serve(folder: Path, opened: socket.socket, host: str) -> None:
    """Until Ctrl-C or SIGTERM, which end it at once."""
    import uvicorn

    hub = Hub(folder)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            hub.close()  # else uvicorn waits for the viewers
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        application(hub, host),
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=5,
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[opened])


def _file(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
