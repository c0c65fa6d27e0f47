"""What Microsoft's client for Python does with a container that Postrider writes to."""

import os
import sys
import uuid

from azure.core import MatchConditions
from azure.cosmos import CosmosClient
from azure.cosmos.exceptions import (
    CosmosAccessConditionFailedError,
    CosmosBatchOperationError,
    CosmosHttpResponseError,
    CosmosResourceExistsError,
)

client = CosmosClient(os.environ["COSMOS_ENDPOINT"], os.environ["COSMOS_KEY"])
contacts = client.get_database_client("shop").get_container_client("contacts")


def event(action, seq):
    return {
        "id": str(uuid.uuid4()),
        "partitionKey": "c1",
        "type": "domainEvent",
        "data": {"contactId": "c1", "action": action},
        "ttl": 864000,
        "seq": seq,
    }


def save(action, etag=None):
    contact = contacts.read_item("c1", partition_key="c1")
    contact["lastSeq"] += 1
    contact["data"]["changedBy"] = action
    operations = [
        ("replace", ("c1", contact), {"if_match_etag": etag or contact["_etag"]}),
        ("create", (event(action, contact["lastSeq"]),)),
    ]
    return contacts.execute_item_batch(operations, partition_key="c1")


def actions(changes):
    return [c["data"]["action"] for c in changes if c["type"] == "domainEvent"]


# What Postrider wrote, by id, by its version and by a query.
contact = contacts.read_item("c1", partition_key="c1")
assert contact["data"] == {"name": "John"} and contact["lastSeq"] == 1, contact
try:
    contacts.replace_item("c1", contact, etag='"x"', match_condition=MatchConditions.IfNotModified)
    sys.exit("a stale version was replaced")
except CosmosAccessConditionFailedError:
    pass
query = "SELECT VALUE COUNT(1) FROM c WHERE c.type = 'domainEvent'"
assert list(contacts.query_items(query, enable_cross_partition_query=True)) == [1]

# A batch, one that fails whole, and one that is sent twice.
stale = contact["_etag"]
results = save("FromSdk")
assert [result["statusCode"] for result in results] == [200, 201], results
try:
    save("Stale", etag=stale)
    sys.exit("a batch with a stale version was saved")
except CosmosBatchOperationError as error:
    assert error.error_index == 0, error.error_index
    codes = [result["statusCode"] for result in error.operation_responses]
    assert codes == [412, 424], codes
twice = event("FromSdk", 9)
contacts.create_item(twice)
contacts.delete_item(twice["id"], partition_key="c1")

# The change feed, before and after a split, from one continuation to the next.
seen = actions(contacts.query_items_change_feed(start_time="Beginning"))
print("seen", *seen, flush=True)
token = contacts.client_connection.last_response_headers["etag"]
print("split", flush=True)
sys.stdin.readline()
save("AfterSplit")
seen = actions(contacts.query_items_change_feed(continuation=token))
print("seen", *seen, flush=True)

# What the service does and the emulator does not.
patch = ("patch", ("c1", [{"op": "set", "path": "/data/name", "value": "x"}]))
try:
    contacts.execute_item_batch([patch], partition_key="c1")
    print("patches in batches", flush=True)
except (CosmosBatchOperationError, CosmosHttpResponseError) as error:
    print("no patches in batches:", error.status_code, flush=True)
print("done", flush=True)
