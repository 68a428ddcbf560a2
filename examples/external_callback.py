"""A payment service calls back, minutes or days later. Its callback URL is a signed link that can be used once.

python examples/external_callback.py
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from stage import say, store, working

from flowfabric import Context, Fabric, FabricError


@dataclass
class Payment:
    status: str
    amount: int


class Callbacks(BaseHTTPRequestHandler):
    """The public endpoint. It replaces `ff serve`, which accepts the same JSON at the same path."""

    loop: asyncio.AbstractEventLoop

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        run_id = unquote(self.path).split("/")[3]
        vote = checkout.run(run_id).vote(self.path, body, by="payment service")
        try:
            asyncio.run_coroutine_threadsafe(vote, self.loop).result(10)
            self.send_response(202)
        except FabricError as refused:  # a wrong token, a second use, an expired wait
            self.send_response(409 if refused.kind == "waitpoint_closed" else 403)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Log nothing."""


endpoint = ThreadingHTTPServer(("127.0.0.1", 0), Callbacks)
app = Fabric(store(), public_url=f"http://127.0.0.1:{endpoint.server_port}")


def payment_service(callback_url: str, amount: int) -> None:
    """Act as the payment service, which calls back."""

    def post(url: str) -> int:
        body = json.dumps({"status": "paid", "amount": amount}).encode()
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
            with urllib.request.urlopen(request) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    say("payment service: with a forged token I get", post(callback_url[:-4] + "0000"))
    say("payment service: with mine I get", post(callback_url))


async def start_payment(order: str, callback_url: str) -> None:
    say(f"{order}: the payment service may call back {callback_url.partition('?')[0]}?token=…")
    threading.Timer(0.5, payment_service, (callback_url, 4200)).start()


@app.task
async def checkout(ctx: Context, order: str) -> str:
    paid = await ctx.approval("paid", Payment, expires="1d")
    await ctx.step(start_payment, order, paid.links[0])
    answers = await paid  # parked until the callback arrives, or until tomorrow
    if answers.expired:
        return f"{order} was never paid"
    return f"{order}: {answers[0].value.status}, {answers[0].value.amount} cents, says the {answers[0].by}"


async def main() -> None:
    Callbacks.loop = asyncio.get_running_loop()
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    async with working(app):
        run = await checkout.submit("order-7")
        say(await run.result(timeout=20))
    endpoint.shutdown()
    endpoint.server_close()


if __name__ == "__main__":
    asyncio.run(main())
