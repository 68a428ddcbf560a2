"""The Valkey store; `ValkeyClient` is its connection to one server or to a cluster.

How the store uses the client:

    client = ValkeyClient(parse_url("valkey+cluster://a:6379,b:6379?wait=1"), deadlines)
    client.library = text     # loaded on any node that answers "Function not found"; the call is sent again then
    await client.open()
    for warning in await check_servers(client):       # settings that lose rows are refused
        logger.warning(warning)

    reply = await client.call("{fp:3}", "FCALL", name, 2, "{fp:3}:execution", "{fp:3}:f", argument)
    reply = await client.read("{fp:3}", "FCALL_RO", name, 1, "{fp:3}:execution")

`call` and `read` return a future, and the command is queued for the socket before they return: calls to one node
without an await between them are executed in the order of the calls, also through `Node.call` on the same node. `call`
uses the write connection of the node, `read` its read connection, so a read may overtake a write.

* The first argument is a tag (`{fp:3}`) or a key; it chooses the node and is not sent. PUBLISH may be sent with the tag
  of a commit: it follows that commit on the same connection, and reaches the subscribers of every node.
* Arguments are str, bytes, int or float. Replies are bytes, int, None, or a list of these.
* `node_for(tag)` returns the `Node` that serves a tag now; group tags by it to ask many partitions with one call a
  node, `Node.call(…)` or `Node.read(…)`. Such calls follow no redirects.
* `primaries()` lists the nodes with slots; `for_each_primary(…)` sends a command to each and returns the replies.
* `subscribe(ChannelSubscription("channel", on_message=…, on_reconnect=…))` reconnects by itself. Messages in between
  are lost, so `on_reconnect` should make the store poll once. `ChannelSubscription.ready` is an event.
* `address.database` is the number of the database: channels are not part of a database, so put it into their names.

Errors (`errors.py` has the table): `StoreUnavailable` with `in_doubt`; `Corruption` for an error that must not happen;
`ReplyError` with `code` and `text` if a function returns an error whose code begins with FF (it has written nothing). A
batch that WAIT or WAITAOF confirms too late is in doubt. A write that was sent is never repeated by the client.
"""

from flowfabric.stores.valkey.address import ValkeyAddress, parse_url
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.errors import ReplyError
from flowfabric.stores.valkey.node import Node
from flowfabric.stores.valkey.server_checks import check_servers
from flowfabric.stores.valkey.subscription import ChannelSubscription

__all__ = ["ChannelSubscription", "Node", "ReplyError", "ValkeyAddress", "ValkeyClient", "check_servers", "parse_url"]
